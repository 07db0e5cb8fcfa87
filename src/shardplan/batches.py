"""Which data a rank trains on: ranks of one tp group take the same rows, data-parallel ranks take different ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardplan.agreement import checksum, equal_on_ranks, fingerprint
from shardplan.mesh import REPLICATE, SHARDING, TP, mesh_spec

_PLAIN = (type(None), bool, int, float, str, bytes)


def data_parallel_rank_and_size(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's number among those that take different rows, and how many there are: what a sampler needs.

    They are counted over ``dp_replicate`` and ``dp`` in mesh order. Ranks that differ in tp take the same batch; ranks
    that differ in cp take parts of the same rows.

    Raises:
        PlanError: SP301, a mesh that plans cannot use.
    """
    names = mesh_spec(mesh.mesh_dim_names, mesh.shape).axes
    rank, size = 0, 1
    for axis, degree in names:
        if axis == REPLICATE or axis in SHARDING:
            rank, size = rank * degree + mesh.get_local_rank(axis), size * degree
    return rank, size


def require_same_batch(batch: Any, mesh: DeviceMesh) -> None:
    """Raise on every rank of ``mesh`` unless the ranks of each tp group hold the same batch, bit for bit.

    Nothing else notices: each rank of a tp group would compute its part of another forward, and the sums would be of
    no model. Every rank of the mesh must call it. Only checksums travel, in two all-reduces over tp and one over each
    axis; the host waits for each tensor's, so call it for the first batches, or now and then.

    Args:
        batch: tensors, and plain numbers and strings, in mappings, lists and tuples of any depth.
        mesh: as given to `apply_plan`.

    Raises:
        ValueError: naming what differs within a tp group, or what cannot be compared.
    """
    if not mesh_spec(mesh.mesh_dim_names, mesh.shape).has_tp:
        return
    problem = _problem(dict(_leaves(batch, "")), mesh[TP])
    everywhere = equal_on_ranks([int(problem is not None)], mesh)[0]
    if problem is not None or not everywhere:
        raise ValueError(
            f"{problem or 'another tp group received different batches'}; every rank of a tp group must be given the "
            "same batch: let a sampler take its rank and size from data_parallel_rank_and_size(mesh)"
        )


def _problem(leaves: dict[str, Any], tp: DeviceMesh) -> str | None:
    """What is wrong with this tp group's batches; None when they are equal. The same text on each of its ranks."""
    structure = [(name, type(leaf).__name__) for name, leaf in leaves.items()]
    if not equal_on_ranks([fingerprint(structure)], tp)[0]:
        return (
            "ranks of one tp group received batches of different structure: other names, or another number of tensors"
        )
    for name, leaf in leaves.items():
        if not isinstance(leaf, (Tensor, *_PLAIN)) or isinstance(leaf, DTensor):
            return f"the batch holds {type(leaf).__name__} under '{name}', which cannot be compared"
    numbers = [checksum(leaf) if isinstance(leaf, Tensor) else fingerprint(leaf) for leaf in leaves.values()]
    different = [name for name, equal in zip(leaves, equal_on_ranks(numbers, tp), strict=True) if not equal]
    return f"ranks of one tp group received different batches: {', '.join(different)}" if different else None


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _leaves(value, f"{name}[{number}]")
    else:
        yield name or "batch", node
