"""What ranks do in tests of comparisons that gather nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import parity
import tiny_models
from pool import build_mesh
from shardplan.verify.distances import distances
from shardplan.verify.replicas import unequal_replicas
from shardplan.weights import Stored

MESH = "dp=2,tp=2"
LAYOUTS: dict[str, tuple[Placement, Placement]] = {
    "whole": (Replicate(), Replicate()),
    "rows": (Replicate(), Shard(0)),
    "columns": (Shard(0), Shard(1)),
    "uneven": (Shard(0), Replicate()),
}


def _tensors(shift: float) -> dict[str, Tensor]:
    """The same on every rank: 5 x 4 each, so that rows are cut unevenly."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(5, 4, generator=generator) + shift for name in LAYOUTS}


def _stored(tensors: dict[str, Tensor]) -> dict[str, Stored]:
    """One tensor in each layout, and one more in two sections side by side."""
    mesh = build_mesh(MESH)
    cut = {name: distribute_tensor(tensor, mesh, LAYOUTS[name]) for name, tensor in tensors.items()}
    sections = tuple(distribute_tensor(part, mesh, LAYOUTS["rows"]) for part in tensors["whole"].split([2, 3]))
    return {name: Stored(name, (part,)) for name, part in cut.items()} | {"packed": Stored("packed", sections)}


def measured() -> list[dict[str, float]]:
    """By `--verify`'s function, by the parity suite's, and gathered."""
    sharded, wanted = _stored(_tensors(0.0)), _tensors(0.5)
    wanted["packed"] = wanted["whole"]
    gathered = {name: (sharded[name].whole() - whole).norm().item() for name, whole in wanted.items()}
    return [distances(sharded, wanted), parity.norms_of_differences(sharded, wanted), gathered]


def unequal(rank: int, name: str) -> list[Any]:
    """The names that both functions give once a rank alters its part of one tensor."""
    tensors = {entry: stored.parts[0] for entry, stored in _stored(_tensors(0.0)).items()}
    altered = tensors[name]
    assert isinstance(altered, DTensor)
    if dist.get_rank() == rank:
        altered.to_local()[0, 0] += 1e-6
    faults = parity.different_replicas(dict(tensors))
    return [sorted(unequal_replicas(tensors)), sorted({fault.split()[2] for fault in faults})]


def faults_where_a_gradient_is_altered(model: str, rank: int) -> list[list[str]]:
    """What the parity suite says once one element of a gradient is off, of each in turn."""
    mesh, batch = build_mesh(MESH), parity.Batch()
    reference = parity.kept(model, {})
    sharded = parity.Case(model, MESH, sequence_parallel=False).apply(tiny_models.build(model), mesh)
    assert list(parity.compare_batch(reference, sharded, mesh, batch, seed=1)) == []
    expected, said = reference.batch(batch, 1).gradients, []
    for name, stored in parity.stored_in(sharded).items():
        gradient = stored.gradient()
        assert gradient is not None
        held = [part.to_local() for part in gradient.parts if isinstance(part, DTensor)]
        before = held[-1].clone()
        if dist.get_rank() == rank:
            held[-1].view(-1)[-1:] += 0.1 * expected[name].norm()
        faults = [fault for fault in parity.same_gradients(expected, sharded) if "replicas" not in fault]
        said.append([name, *(fault.split()[2] for fault in faults)])
        held[-1].copy_(before)
    return said
