"""The collectives of one step, each with the module that it belongs to and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardplan import _compat
from shardplan.dry_run.dispatch import CollectivesMode, Sent
from shardplan.dry_run.running import LOSS, Running
from shardplan.parallel.collectives import SumGradients

_SUM_NODE = f"{SumGradients.__name__}Backward"


class Purpose(Enum):
    """What a collective is for; totals go by it."""

    EDGE = "tp"
    SUM = "tp, gradients"  # of replicated parameters, coalesced
    FSDP = "FSDP2"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of a step.

    Attributes:
        module: fqn of the module whose edge it is, or of the FSDP2 unit; `LOSS` for the loss's.
        direction: ``forward``, ``backward``, or ``recomputation``, a forward that runs in the backward.
        name: ``all_reduce``, ``all_gather``, ...
        nbytes: what this rank puts in.
    """

    module: str
    direction: str
    purpose: Purpose
    name: str
    nbytes: int


class Recorder(CollectivesMode):
    """Keeps the `Call`s of one step.

    Attributes:
        calls: in the order in which they ran.
        backward: set it when the backward begins.
    """

    def __init__(self, running: Running, fqns: Mapping[str, str]) -> None:
        """``fqns`` gives the names of FSDP2's units by their paths."""
        super().__init__()
        self.calls: list[Call] = []
        self.backward = False
        self._running, self._fqns = running, fqns
        self._labels: list[str | None] = []

    def dispatched(self, func: Any, args: Any) -> None:
        if func.namespace == "profiler":
            self._label(func.name(), args)
        elif self.backward:
            self._running.note()
        super().dispatched(func, args)

    def sent(self, collective: Sent) -> None:
        running = self._running
        recomputing = self.backward and running.forwarding
        direction = "recomputation" if recomputing else "backward" if self.backward else "forward"
        module, purpose = self._owner(collective)
        self.calls.append(Call(module, direction, purpose, collective.name, collective.nbytes))

    def _owner(self, collective: Sent) -> tuple[str, Purpose]:
        """FSDP2 works ahead of the modules it serves, so that only its own label tells the unit."""
        unit = next((label for label in reversed(self._labels) if label is not None), None)
        if unit is not None:
            return self._fqns.get(unit, unit), Purpose.SUM if collective.functional else Purpose.FSDP
        module = self._running.module
        if module == LOSS:
            return LOSS, Purpose.LOSS
        if self.backward and not self._running.forwarding and self._running.node == _SUM_NODE:
            return "", Purpose.SUM  # without FSDP2 there is one sum, the model's
        return module, Purpose.EDGE

    def _label(self, name: str, args: Any) -> None:
        if "_record_function_enter" in name:
            self._labels.append(_compat.fsdp_label(str(args[0])))
        elif self._labels:
            self._labels.pop()
