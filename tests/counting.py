"""Counts the collectives of a forward or a backward as they are dispatched, recomputation included."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardplan.dry_run.dispatch import CollectivesMode, Sent


class Counting(CollectivesMode):
    """``ours`` counts collectives by group name and kind; ``plain`` those that FSDP2 and the test itself call."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: Counter[tuple[str, str]] = Counter()
        self.plain: Counter[str] = Counter()

    def sent(self, collective: Sent) -> None:
        if collective.functional:
            self.ours[collective.group, collective.name] += 1
        else:
            self.plain[collective.name] += 1

    def over(self, group: str) -> dict[str, int]:
        """Our collectives over one group, by kind."""
        return {kind: number for (name, kind), number in sorted(self.ours.items()) if name == group}


def counted(function: Any, *args: Any) -> tuple[Any, Counting]:
    with Counting() as counting:
        result = function(*args)
    return result, counting


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """A loss without collectives of its own: the sum of this rank's part of the logits."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).float().sum()
