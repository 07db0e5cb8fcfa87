"""How far tensors of a sharded model are from those of the unsharded one; each rank looks at what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from shardplan.weights import Stored, copies_of


def distances(sharded: Mapping[str, Stored], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of the difference of each whole tensor, the same on every rank; every rank calls it.

    Args:
        sharded: by name, of which copies count once: whether they are the same is another question.
        wanted: whole tensors by names that ``sharded`` has.
    """
    squares = torch.zeros(len(wanted), dtype=torch.float64)
    for number, (name, whole) in enumerate(wanted.items()):
        for part, (held, own) in zip(sharded[name].parts, sharded[name].beside(whole), strict=True):
            squares[number] += (held - own).norm().item() ** 2 / copies_of(part)
    dist.all_reduce(squares)
    return {name: sqrt(square) for name, square in zip(wanted, squares.tolist(), strict=True)}
