"""Counts the collectives of a forward or a backward as they are dispatched, recomputation included."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Names under which functional (ours) and plain collectives (FSDP2's) are dispatched -> what they are.
_KINDS = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
}
_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_", "barrier"}


class Counting(TorchDispatchMode):
    """``ours`` counts collectives by group name and kind; ``plain`` those that FSDP2 and the test itself call."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: Counter[tuple[str, str]] = Counter()
        self.plain: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's turn; what it calls comes back here
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "_c10d_functional" and name not in _SILENT:
            group = next(arg for arg in reversed(args) if isinstance(arg, str))
            self.ours[group, _KINDS[name]] += 1
        elif func.namespace == "c10d" and name not in _SILENT:
            self.plain[_KINDS[name]] += 1
        return func(*args, **(kwargs or {}))

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
