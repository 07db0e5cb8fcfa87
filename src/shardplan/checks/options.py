"""Checks of what a plan or a call asks beyond layouts."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.target import Target
from shardplan.diagnostics import Diagnostic, Severity

HALF = ("bfloat16", "float16")


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


def check_reduce_dtype(target: Target) -> Iterator[Diagnostic]:
    """SP213: without a reduce dtype FSDP2 adds gradients up in the dtype of the parameters' copies."""
    policy = target.resolved.plan.mixed_precision
    if policy is not None and policy.param in HALF and policy.reduce is None and target.mesh.has_dp:
        yield Diagnostic(
            "SP213",
            f"gradients are added up over {target.mesh.size} ranks in {policy.param}: mixed_precision names no reduce",
            where=target.resolved.plan.where,
            subject="mixed_precision",
            expected="`reduce: float32`, or `reduce: " + f"{policy.param}` where that is meant",
            hint="torch takes the parameters' dtype; at 8 bits of mantissa small gradients are lost beside large ones",
            severity=Severity.WARNING,
        )


def check_dropout(target: Target) -> Iterator[Diagnostic]:
    """SP209: a mask that each rank draws for itself agrees with the other ranks' only if they are seeded alike."""
    dropout = target.resolved.inventory.dropout
    if dropout and target.mesh.has_tp:
        named = ", ".join(f"{name}={value:g}" for name, value in dropout)
        yield Diagnostic(
            "SP209",
            f"dropout is on ({named}), and every tp rank draws masks of its own for what it computes",
            where=target.resolved.plan.where,
            subject="dropout",
            expected="ranks of a tp group seeded alike, or no dropout",
            hint="seed each tp group alike (by its dp rank): otherwise the residual stream differs between its ranks; "
            "heads on different ranks then share attention masks",
            severity=Severity.WARNING,
        )
