"""``plan-compile --diff OTHER``: what changes from a plan to another one, to another mode or to another mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from shardplan.command.answer import Compiled, compile_first, require_model
from shardplan.command.request import Request
from shardplan.findings import Findings

if TYPE_CHECKING:
    from shardplan.diff import Difference

MODES = {"tp": False, "sp": True}


def diff_one(
    plan: str, other: str, request: Request, findings: Findings, *, printing: bool
) -> Iterator[dict[str, Any]]:
    """Compare one plan, on the first model and mesh that it is for, with ``other``."""
    before = require_model(plan, compile_first(plan, request, findings), findings, "--diff")
    if before is None or before.plan is None:
        return
    name, asked = _other(plan, other, before, request)
    after = compile_first(name, asked, findings)
    if after is None or after.plan is None:
        return
    from shardplan.diff import Difference, differences
    from shardplan.facts import in_situation

    changes = differences(in_situation(before.plan), in_situation(after.plan))
    difference = Difference(f"{plan} on {before.situation}", f"{name} on {after.situation}", changes)
    if printing:
        click.echo(text(difference))
    yield asdict(difference)


def _other(plan: str, other: str, before: Compiled, request: Request) -> tuple[str, Request]:
    """The plan and the request that ``--diff`` means: all else is as in the first."""
    target = before.situation.target
    same = replace(
        request,
        model=before.situation.model,
        mesh=str(target.mesh),
        sequence_parallel=target.sequence_parallel,
    )
    what, equals, value = other.partition("=")
    if not equals:
        return other, replace(same, overlays=())
    if what == "mesh":
        return plan, replace(same, mesh=value)
    if what == "mode" and value in MODES:
        return plan, replace(same, sequence_parallel=MODES[value])
    raise click.BadParameter(f"'{other}' is no plan, no mode=tp or mode=sp, and no mesh=AXES", param_hint="--diff")


def text(difference: Difference) -> str:
    """For people: section by section."""
    lines = [f"from {difference.before}", f"to   {difference.after}"]
    if not difference.changes:
        return "\n".join([*lines, "  no difference", ""])
    for section in dict.fromkeys(change.section for change in difference.changes):
        lines.append(f"  {section.replace('_', ' ')}")
        lines += [f"    {change}" for change in difference.changes if change.section == section]
    return "\n".join([*lines, ""])
