"""``plan-compile`` without a mode: print what a plan comes to."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import click

from shardplan.command.answer import compile_first
from shardplan.command.request import Request
from shardplan.findings import Findings


def compile_one(name: str, request: Request, findings: Findings, *, printing: bool) -> Iterator[dict[str, Any]]:
    """Compile one plan on the first model and mesh that it is for; print it, and give it as data."""
    compiled = compile_first(name, request, findings)
    if compiled is None or compiled.plan is None:
        return
    from shardplan.report import as_dict, make_report
    from shardplan.tables import report_text

    report = make_report(compiled.situation.target, compiled.plan)
    if printing:
        click.echo(report_text(report, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    yield as_dict(report, compiled.plan)
