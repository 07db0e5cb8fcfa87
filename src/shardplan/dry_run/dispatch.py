"""Collectives as they are dispatched, recomputation included: of functional ones (ours) and plain ones (FSDP2's)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardplan import _compat

# Names under which functional and plain collectives are dispatched -> what they are, and which argument is sent.
_KINDS = {
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
}
_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_", "barrier"}


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective: what it is, over which group, how many bytes a rank puts in; functional or plain."""

    name: str
    group: str
    nbytes: int
    functional: bool


class CollectivesMode(TorchDispatchMode):
    """Tells `sent` of every collective while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13

    @abstractmethod
    def sent(self, collective: Sent) -> None:
        """A collective is about to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's turn; what it calls comes back here
        self.dispatched(func, args)
        return func(*args, **(kwargs or {}))

    def dispatched(self, func: Any, args: Any) -> None:
        """An operation, of any kind, is about to run."""
        if func.namespace in ("_c10d_functional", "c10d"):
            name = func.name().partition("::")[2].partition(".")[0]
            if name not in _SILENT:
                kind, sending = _KINDS.get(name, (name, 0))
                functional = func.namespace == "_c10d_functional"
                self.sent(Sent(kind, _compat.group_of(args), _nbytes(args[sending]), functional))


def _nbytes(sent: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(sent) if isinstance(x, torch.Tensor))
