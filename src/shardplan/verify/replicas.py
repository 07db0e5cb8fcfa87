"""Whether the copies of a tensor that several ranks hold are the same, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def unequal_replicas(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The names of those that differ between ranks, from the last to the first; every rank calls it."""
    for name, tensor in reversed(list(tensors.items())):
        if not isinstance(tensor, DTensor):
            continue
        for axis, placement in enumerate(tensor.placements):
            if placement.is_replicate() and tensor.device_mesh.size(axis) > 1:
                local = tensor.to_local().detach().contiguous()
                copies = [torch.empty_like(local) for _ in range(tensor.device_mesh.size(axis))]
                dist.all_gather(copies, local, group=tensor.device_mesh.get_group(axis))
                if not all(torch.equal(copies[0], copy) for copy in copies):
                    yield name
