"""What answers have in common: one plan in the one situation that they are about, checked and compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from shardplan.command.request import Request, Situation
from shardplan.diagnostics import PlanError, errors
from shardplan.findings import Findings

if TYPE_CHECKING:
    from shardplan.compiled import CompiledPlan


@dataclass(frozen=True, slots=True)
class Compiled:
    """A situation and what its plan was compiled to; None where the plan is refused."""

    situation: Situation
    plan: CompiledPlan | None


def compile_situation(situation: Situation, findings: Findings) -> Compiled:
    """Check, and compile what passes."""
    from shardplan.check import check
    from shardplan.lower import lower

    target = situation.target
    found = check(target)
    findings.add(found, str(situation), situation.asked)
    if errors(found):
        return Compiled(situation, None)
    return Compiled(situation, lower(target.resolved, target.mesh, sequence_parallel=target.sequence_parallel))


def compile_first(name: str, request: Request, findings: Findings) -> Compiled | None:
    """The first model and mesh of a plan, compiled; None where there is none or the plan cannot be had.

    Whatever keeps it from being compiled is among the findings.
    """
    try:
        plan = request.plan(name)
        if request.missing(plan):
            findings.add(request.file_only(plan), asked=request.asked(name, plan))
            return None
        return compile_situation(request.first(name, plan), findings)
    except PlanError as refused:
        findings.add(refused.diagnostics)
        return None


def require_model(name: str, compiled: Compiled | None, findings: Findings, option: str) -> Compiled | None:
    """The same for an answer that is empty without a model.

    Raises:
        click.UsageError: the plan is well, but names no model or no mesh.
    """
    if compiled is None and not findings.exit_code(strict=False):
        raise click.UsageError(f"{option} needs a model and a mesh, and {name} names none: pass --model and --mesh")
    return compiled
