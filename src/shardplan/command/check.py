"""``plan-compile --check``: everything that can be said without running anything."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.command.request import Request, Situation
from shardplan.diagnostics import PlanError, errors
from shardplan.findings import Findings


def check_one(name: str, request: Request, findings: Findings) -> None:
    """Check one plan on every model, mesh and mode that it is to be checked on."""
    for _ in passing(name, request, findings):
        pass


def passing(name: str, request: Request, findings: Findings) -> Iterator[Situation]:
    """Check one plan in every situation; those without an error are given, for what comes after a check."""
    from shardplan.check import check

    try:
        plan = request.plan(name)
        if request.missing(plan):
            findings.add(request.file_only(plan), asked=request.asked(name, plan))
            return
        for situation in request.situations(name, plan):
            if isinstance(situation, PlanError):
                findings.add(situation.diagnostics)
                continue
            found = check(situation.target)
            findings.add(found, str(situation), situation.asked)
            if not errors(found):
                yield situation
    except PlanError as refused:
        findings.add(refused.diagnostics)
