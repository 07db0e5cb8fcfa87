"""Seconds, collectives and bytes of a forward and backward on two ranks: shardplan, what else there is, and the floor.

    python tests/benchmarks/speed.py [--rounds 40] [--record FILE]

Contestants take turns, one step each a round, on the same weights and batches; what counts is the median over rounds of
a contestant's seconds over the floor's in the same round. The floor runs twice: what it differs from itself by (A/A) is
what a ratio is worth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from contestants import CONTESTANTS, VOCABULARY, step, takes_part

from shardplan.dry_run.dispatch import CollectivesMode, Sent

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

SIZES = ((64, 16, 1), (256, 128, 2), (512, 256, 2))  # hidden, sequence, batch
MESHES = ("tp=2", "dp=1,tp=2")  # the second has FSDP2 on every contestant
RANKS, WARM_UP = 2, 3
FLOOR, AGAIN = "floor", "floor again"


@dataclass(frozen=True)
class Setting:
    size: tuple[int, int, int]
    mesh: str
    sequence_parallel: bool

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.size))} {'SP' if self.sequence_parallel else 'TP'}"


@dataclass(frozen=True)
class Measured:
    """One contestant: seconds by round, and the collectives of a step over tp with the bytes that a rank puts in."""

    seconds: list[float]
    calls: int
    nbytes: int


class _Counting(CollectivesMode):
    """All but those of FSDP2, which go over ``dp``."""

    def __init__(self, dp: str | None) -> None:
        super().__init__()
        self.dp = dp
        self.calls = self.nbytes = 0

    def sent(self, collective: Sent) -> None:
        if collective.group != self.dp:
            self.calls += 1
            self.nbytes += collective.nbytes


def measure(setting: Setting, rounds: int) -> dict[str, Measured]:
    """On each rank."""
    torch.set_num_threads(1)
    hidden, sequence, batch = setting.size
    names, sizes = zip(*(axis.split("=") for axis in setting.mesh.split(",")), strict=True)
    mesh = dist.init_device_mesh("cpu", tuple(map(int, sizes)), mesh_dim_names=names)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (batch, sequence), generator=generator)
    gradient = torch.randn(batch, sequence, VOCABULARY, generator=generator)
    models = {
        name: build(hidden, mesh, setting.sequence_parallel)
        for name, build in CONTESTANTS.items()
        if takes_part(name, mesh, setting.sequence_parallel)
    }
    for _ in range(WARM_UP):
        for model in models.values():
            _timed(model, ids, gradient)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    order = list(models)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds[name].append(_timed(models[name], ids, gradient))
    dp = mesh.get_group("dp").group_name if "dp" in names else None
    return {name: Measured(seconds[name], *sent(model, ids, gradient, dp)) for name, model in models.items()}


def _timed(model: Any, ids: torch.Tensor, gradient: torch.Tensor) -> float:
    for parameter in model.parameters():
        parameter.grad = None
    dist.barrier()
    start = time.perf_counter()
    step(model, ids, gradient)
    dist.barrier()
    return time.perf_counter() - start


def sent(model: Any, ids: torch.Tensor, gradient: torch.Tensor, dp: str | None) -> tuple[int, int]:
    with _Counting(dp) as counting:
        step(model, ids, gradient)
    return counting.calls, counting.nbytes


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Result:
    """A contestant in a setting. ``ratio``: median of seconds over the floor's, ``low``, ``high``: its quartiles."""

    setting: str
    fsdp2: bool
    contestant: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    calls: int
    kilobytes: float


def results(setting: Setting, measured: dict[str, Measured]) -> Iterator[Result]:
    floor = measured[FLOOR].seconds
    for name, own in measured.items():
        ratios = [mine / its for mine, its in zip(own.seconds, floor, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        yield Result(
            setting=str(setting),
            fsdp2="dp" in setting.mesh,
            contestant=name,
            milliseconds=round(1000 * median(own.seconds), 2),
            ratio=round(median(ratios), 3),
            low=round(low, 3),
            high=round(high, 3),
            calls=own.calls,
            kilobytes=round(own.nbytes / 1000, 1),
        )


HEADINGS = ("hidden, sequence, batch", "contestant", "ms", "over the floor", "quartiles", "collectives", "kB")


def table(listed: list[Result], fsdp2: bool) -> str:
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS))]
    for r in (r for r in listed if r.fsdp2 is fsdp2):
        numbers = (f"{r.milliseconds:.1f}", f"{r.ratio:.2f}", f"{r.low:.2f} to {r.high:.2f}", str(r.calls))
        lines.append(_line((r.setting, r.contestant, *numbers, f"{r.kilobytes:.0f}")))
    return "\n".join(lines)


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    from pool import Pool

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--mesh", action="append", help="one of the meshes; may be repeated")
    parser.add_argument("--size", type=int, action="append", help="the number of a size; may be repeated")
    parser.add_argument("--record", type=Path, help="a file for the results, one JSON object a line")
    arguments = parser.parse_args()
    pool, listed = Pool(RANKS), []
    for mesh in arguments.mesh or MESHES:
        for size in [SIZES[number] for number in arguments.size or range(len(SIZES))]:
            for sequence_parallel in (False, True):
                setting = Setting(size, mesh, sequence_parallel)
                measured = pool.run(RANKS, measure, setting, arguments.rounds, timeout=900.0)[0]
                listed += results(setting, measured)
                for result in listed[-len(measured) :]:
                    print(json.dumps(asdict(result)), file=sys.stderr)
    pool.close()
    for fsdp2 in (False, True):
        print(table(listed, fsdp2), end="\n\n")
    if arguments.record:
        arguments.record.write_text("".join(json.dumps(asdict(result)) + "\n" for result in listed))


if __name__ == "__main__":
    main()
