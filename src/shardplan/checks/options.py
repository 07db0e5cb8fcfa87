"""Checks of what a plan or a call asks beyond layouts."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.target import Target
from shardplan.diagnostics import Diagnostic


def check_options(target: Target) -> Iterator[Diagnostic]:
    """SP304: mixed precision and CPU offload are FSDP2's, and FSDP2 needs a dp axis."""
    plan = target.resolved.plan
    asked = {"mixed_precision": plan.mixed_precision is not None, "cpu_offload": bool(plan.cpu_offload)}
    for option, wanted in asked.items():
        if wanted and not target.mesh.has_dp:
            yield Diagnostic(
                "SP304",
                f"{option} is asked for, but mesh '{target.mesh}' has no dp axis, and it is FSDP2 that provides it",
                where=plan.where,
                subject=option,
                expected="a dp axis; one of size 1 will do",
                hint=f"use mesh 'dp=1,{target.mesh}', or pass {option}=False",
            )
