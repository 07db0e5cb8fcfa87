"""``plan-compile --verify``: the numeric proof, for plans that the checks have passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardplan.command.check import passing
from shardplan.command.request import Request, Situation, model_of
from shardplan.diagnostics import PlanError
from shardplan.findings import Findings
from shardplan.verify.ranks import LocalRanks

if TYPE_CHECKING:
    from torch import nn

    from shardplan.verify.prove import Subject


Proven = dict[str, Any]  # one proof, as JSON


class Verifier:
    """Proves plans on one set of processes, which start while this one still imports."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._ranks = LocalRanks(processes)
        self._proven: set[tuple[Any, ...]] = set()
        self._shown: tuple[str, ...] | None = None

    def verify_one(
        self, name: str, request: Request, findings: Findings, *, printing: bool
    ) -> Iterator[dict[str, Any]]:
        """Check one plan in every situation, prove it where the checks pass, and say what was run."""
        for situation in passing(name, request, findings):
            try:
                yield from self._prove(name, situation, findings, printing=printing)
            except PlanError as refused:
                findings.add(refused.diagnostics, str(situation), situation.asked)

    def _prove(
        self, plan: str, situation: Situation, findings: Findings, *, printing: bool
    ) -> Iterator[dict[str, Any]]:
        from shardplan.verify.prove import make_subject, prove

        target = situation.target
        subject = make_subject(model_of(situation.model), target, self._processes, _builder(situation.model))
        key = (plan, situation.model, tuple(map(str, subject.changes)), subject.mesh, target.sequence_parallel)
        if key in self._proven:  # another mesh came to the same small model
            return
        self._proven.add(key)
        start = time.perf_counter()
        found = prove(target, subject, self._ranks)
        findings.add(found, str(situation), situation.asked)
        proof = _as_dict(plan, situation, subject, time.perf_counter() - start, holds=not found)
        if printing:
            click.echo(_text(proof, again=self._shown == tuple(proof["shrunk"])))
            self._shown = tuple(proof["shrunk"])
        yield proof

    def close(self) -> None:
        self._ranks.close()


def _builder(model: str) -> Callable[[], nn.Module] | None:
    """The user's own function, where the model is named as ``module:function``."""
    from shardplan.references import build_model

    return partial(build_model, model, "cpu") if ":" in model else None


def _as_dict(plan: str, situation: Situation, subject: Subject, seconds: float, *, holds: bool) -> dict[str, Any]:
    return {
        "plan": plan,
        "on": str(situation),
        "holds": holds,
        "mesh": str(subject.mesh),
        "shrunk": [str(change) for change in subject.changes],
        "seconds": round(seconds, 2),
    }


def _text(proof: Proven, *, again: bool) -> str:
    verdict = "computes what the unsharded model does" if proof["holds"] else "DEVIATES from the unsharded model"
    lines = [f"{proof['plan']} on {proof['on']}: {verdict} ({proof['mesh']})"]
    if not again:
        lines += ["    shrunk: " + (", ".join(proof["shrunk"]) or "nothing, it is small")]
    return "\n".join(lines)
