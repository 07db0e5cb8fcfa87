"""``plan-compile --check``: everything that can be said without running anything."""

from __future__ import annotations

from shardplan.command.request import Request
from shardplan.diagnostics import PlanError
from shardplan.findings import Findings


def check_one(name: str, request: Request, findings: Findings) -> None:
    """Check one plan on every model, mesh and mode that it is to be checked on."""
    from shardplan.check import check

    try:
        plan = request.plan(name)
        if request.missing(plan):
            findings.add(request.file_only(plan))
            return
        for situation in request.situations(plan):
            if isinstance(situation, PlanError):
                findings.add(situation.diagnostics)
            else:
                findings.add(check(situation.target), str(situation))
    except PlanError as refused:
        findings.add(refused.diagnostics)
