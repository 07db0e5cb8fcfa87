"""What tests/test_pool.py runs on the pool."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pool import build_mesh


def sum_of_ranks() -> tuple[int, int, float, int]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item(), os.getpid()


def threads() -> int:
    return torch.get_num_threads()


def gathered_over(axis: str, spare_groups: int) -> torch.Tensor:
    """Shard 0..3 over one axis of a (2, 2) mesh, double and gather it; spare groups shift the names of the mesh's."""
    for _ in range(spare_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))[axis]
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return (sharded + sharded).redistribute(mesh, [Replicate()]).to_local()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("broken on purpose")
    dist.barrier()


def wait_forever_for(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def return_a_function() -> object:
    return lambda: None


def os_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def keep_a_mesh_in_a_cycle() -> None:
    """As a model with hooks that hold its mesh does."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    cycle: list[object] = [mesh, mesh["tp"]]
    cycle.append(cycle)


def fill_the_caches_of_dtensor() -> None:
    """Which hold the mesh, and with it its groups."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)])
    (tensor @ tensor).full_tensor()
    tensor.redistribute(mesh, [Shard(0), Replicate()])


WORLDS: list[object] = []  # each that this worker was in, kept so that no two look alike


def number_of_world() -> int:
    """How many worlds jobs of this kind have seen; the mesh is that of the world."""
    mesh = build_mesh("tp=2")
    if mesh is not build_mesh("tp=2"):
        raise AssertionError("two meshes in one world")
    if not any(seen is mesh for seen in WORLDS):
        WORLDS.append(mesh)
    return len(WORLDS)
