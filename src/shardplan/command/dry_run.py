"""``plan-compile --dry-run``: the checks, then one step of the real-size model without weights or ranks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import click

from shardplan.command.check import passing
from shardplan.command.request import Request, Situation
from shardplan.diagnostics import PlanError
from shardplan.findings import Findings


def dry_run_one(name: str, request: Request, findings: Findings, *, printing: bool) -> Iterator[dict[str, Any]]:
    """Check one plan in every situation and run it dry where the checks pass; print what is sent, and give it as data.

    The findings are complete once the iterator is exhausted.
    """
    for situation in passing(name, request, findings):
        try:
            yield from _run(name, situation, findings, printing=printing)
        except PlanError as refused:
            findings.add(refused.diagnostics, asked=situation.asked)


def _run(plan: str, situation: Situation, findings: Findings, *, printing: bool) -> Iterator[dict[str, Any]]:
    from shardplan.dry_run.report import as_data, text
    from shardplan.dry_run.run import dry_run
    from shardplan.references import build_meta_model

    ran = dry_run(situation.target, build_meta_model(situation.model))
    findings.add(ran.findings, str(situation), situation.asked)
    if not ran.calls:
        return
    if printing:
        click.echo(f"plan {plan} on {situation}: one step of {ran.length} tokens a rank; bytes that a rank puts in\n")
        click.echo(text(ran, shutil.get_terminal_size().columns if sys.stdout.isatty() else None) + "\n")
    yield {"plan": plan, "on": str(situation), **as_data(ran)}
