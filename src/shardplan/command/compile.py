"""``plan-compile`` without a mode: print what a plan comes to."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import click

from shardplan.command.request import Request
from shardplan.diagnostics import PlanError, errors
from shardplan.findings import Findings


def compile_one(name: str, request: Request, findings: Findings, *, printing: bool) -> Iterator[dict[str, Any]]:
    """Compile one plan on the first model and mesh that it is for; print it, and give it as data."""
    from shardplan.check import check
    from shardplan.lower import lower
    from shardplan.report import as_dict, make_report
    from shardplan.tables import report_text

    try:
        plan = request.plan(name)
        if request.missing(plan):
            findings.add(request.file_only(plan))
            return
        situation = request.first(plan)
    except PlanError as refused:
        findings.add(refused.diagnostics)
        return
    target = situation.target
    found = check(target)
    findings.add(found, str(situation))
    if errors(found):
        return
    compiled = lower(target.resolved, target.mesh, sequence_parallel=target.sequence_parallel)
    report = make_report(target, compiled)
    if printing:
        click.echo(report_text(report, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    yield as_dict(report, compiled)
