"""What tests/test_batches.py runs on the pool."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pool import build_mesh
from shardplan import data_parallel_rank_and_size, require_same_batch


def rank_and_size(mesh: str) -> tuple[int, int]:
    found = data_parallel_rank_and_size(build_mesh(mesh))
    dist.barrier()  # a rank that ended its world here would break the mesh of the others
    return found


def rows_by_sampler(mesh: str) -> list[int]:
    """What torch's sampler deals out, told rank and size."""
    rank, size = rank_and_size(mesh)
    return list(torch.utils.data.DistributedSampler(range(8), size, rank, shuffle=False))  # type: ignore[arg-type]


def batch(**changes: Any) -> dict[str, Any]:
    ids = torch.arange(32).view(2, 16)
    whole = {"input_ids": ids, "masks": (ids > 3, [ids.float(), ids.bfloat16()]), "weight": 0.5, "name": None}
    return {**whole, **changes}


OTHERS: dict[str, Any] = {
    "one id": lambda: batch(input_ids=torch.arange(32).view(2, 16).flip(0)),
    "one bit": lambda: batch(masks=(torch.arange(32).view(2, 16) > 4, batch()["masks"][1])),
    "a shape": lambda: batch(input_ids=torch.arange(32).view(4, 8)),
    "a dtype": lambda: batch(input_ids=torch.arange(32, dtype=torch.int32).view(2, 16)),
    "a number": lambda: batch(weight=0.25),
    "another name": lambda: {"labels": torch.arange(3)},
    "one tensor more": lambda: batch(labels=torch.arange(3)),
    "None": lambda: batch(masks=None),
}


def complaint(mesh: str, odd_rank: int, other: str) -> str:
    """What a rank hears where one rank holds another batch."""
    mine = OTHERS[other]() if dist.get_rank() == odd_rank else batch()
    try:
        require_same_batch(mine, build_mesh(mesh))
    except ValueError as error:
        return str(error)
    return ""


def accepted(mesh: str) -> None:
    """Batches that differ over dp, not over tp; containers of any kind; nothing at all."""
    device_mesh = build_mesh(mesh)
    rank, _ = data_parallel_rank_and_size(device_mesh)
    require_same_batch(batch(input_ids=torch.arange(4 + rank)), device_mesh)
    require_same_batch(UserDict(batch(weight=rank)), device_mesh)
    require_same_batch(torch.full((2, 3), rank), device_mesh)
    require_same_batch([torch.zeros(0, 4), torch.tensor(rank)], device_mesh)
    require_same_batch({}, device_mesh)


def unknown_leaf() -> str:
    try:
        require_same_batch({"cache": {"keys": object()}}, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    except ValueError as error:
        return str(error)
    return ""
