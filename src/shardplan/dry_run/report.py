"""A dry run by kind of module: for people a table, for programs data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardplan.checks.names import general
from shardplan.checks.target import count, size
from shardplan.dry_run.calls import Call, Purpose
from shardplan.dry_run.flops import Flops
from shardplan.dry_run.run import DryRun
from shardplan.grid import grid_lines

_NUMBERS = ("per layer", "per step", "each", "bytes per step")
_HEADINGS = ("for", "at", "direction", "collective", *_NUMBERS)
TOTALS = {"tp": (Purpose.EDGE, Purpose.SUM), "FSDP2": (Purpose.FSDP,), "loss": (Purpose.LOSS,)}


@dataclass(frozen=True, slots=True)
class Row:
    """Calls of one collective at modules of one kind. Bytes are what a rank puts in.

    Attributes:
        module: ``model.layers.*.mlp``, the exact name where it is one alone; for FSDP2 the unit. "" is the model.
        modules: how many of the kind call it: ``calls`` / ``modules`` is what one layer does.
    """

    purpose: str
    module: str
    direction: str
    name: str
    modules: int
    calls: int
    nbytes_per_call: int

    @property
    def nbytes(self) -> int:
        return self.calls * self.nbytes_per_call


def rows(calls: tuple[Call, ...]) -> tuple[Row, ...]:
    """In the order of first calls, the forward's before the backward's; calls of other sizes are rows of their own."""
    fqns: dict[tuple[str, str, str, str, int], Counter[str]] = defaultdict(Counter)
    for call in calls:
        fqns[call.purpose.value, general(call.module), call.direction, call.name, call.nbytes][call.module] += 1
    return tuple(
        Row(
            purpose,
            kind if len(modules) > 1 else next(iter(modules)),
            direction,
            name,
            len(modules),
            modules.total(),
            n,
        )
        for (purpose, kind, direction, name, n), modules in fqns.items()
    )


def totals(calls: tuple[Call, ...]) -> dict[str, tuple[int, int]]:
    """Calls and bytes of one step: over tp, FSDP2's, and the loss's."""
    sent = {name: [call.nbytes for call in calls if call.purpose in purposes] for name, purposes in TOTALS.items()}
    return {name: (len(sizes), sum(sizes)) for name, sizes in sent.items()}


def text(ran: DryRun, width: int | None = None) -> str:
    """The table, the totals below it, and the work of the forward."""
    lines = grid_lines(_HEADINGS, _cells(ran.calls), _NUMBERS, width)
    summed = [f"{name} {count(number, 'call')}, {size(nbytes)}" for name, (number, nbytes) in totals(ran.calls).items()]
    return "\n".join([*lines, "in all: " + "; ".join(summed), *([_work(ran.flops)] if ran.flops else [])])


def _work(flops: Flops) -> str:
    whole, rank = (f"{number / 1e12:.4g} TFLOP" for number in (flops.whole, flops.rank))
    return (
        f"forward: {rank} of matrix products and attention on each rank of {whole}: {flops.sharded_percent:g} % sharded"
    )


def _cells(calls: tuple[Call, ...]) -> Iterator[tuple[str, ...]]:
    for row in rows(calls):
        numbers = (f"{row.calls / row.modules:g}", str(row.calls), size(row.nbytes_per_call), size(row.nbytes))
        yield row.purpose, row.module or "the model", row.direction, row.name, *numbers


def as_data(ran: DryRun) -> dict[str, Any]:
    """The same as JSON-able data."""
    summed = {name: {"calls": number, "nbytes": nbytes} for name, (number, nbytes) in totals(ran.calls).items()}
    sent = [{**asdict(row), "nbytes": row.nbytes} for row in rows(ran.calls)]
    assert ran.flops is not None
    forward = {"flops": ran.flops.whole, "flops_per_rank": ran.flops.rank, "sharded_percent": ran.flops.sharded_percent}
    return {"length": ran.length, "collectives": sent, "totals": summed, "forward": forward}
