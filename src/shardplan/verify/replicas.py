"""Whether the copies of a tensor that several ranks hold are the same, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def unequal_replicas(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The names of those that differ between ranks, from the last to the first; every rank calls it."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    mesh = next((tensor.device_mesh for tensor in sharded.values()), None)
    unequal = {name for axis in range(mesh.ndim) for name in _unequal_along(axis, mesh, sharded)} if mesh else set()
    yield from (name for name in reversed(sharded) if name in unequal)


def _unequal_along(axis: int, mesh: DeviceMesh, tensors: Mapping[str, DTensor]) -> Iterator[str]:
    """By one gather of all that is replicated over an axis."""
    copied = {name: _bytes(t) for name, t in tensors.items() if t.placements[axis].is_replicate()}
    if not copied or mesh.size(axis) == 1:
        return
    own = torch.cat(list(copied.values()))
    copies = [torch.empty_like(own) for _ in range(mesh.size(axis))]
    dist.all_gather(copies, own, group=mesh.get_group(axis))
    sizes = [len(held) for held in copied.values()]
    for name, first, *others in zip(copied, *(copy.split(sizes) for copy in copies), strict=True):
        if not all(torch.equal(first, other) for other in others):
            yield name


def _bytes(tensor: DTensor) -> Tensor:
    return tensor.to_local().detach().contiguous().flatten().view(torch.uint8)
