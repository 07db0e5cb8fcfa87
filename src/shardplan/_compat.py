"""Every private name of torch and transformers that shardplan leans on, with the version it was seen on.

tests/test_compat.py pins the behaviour behind each, so that an upgrade tells us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

# torch 2.13: out-of-place collectives that take the group's *name*, a constant for dynamo and picklable.
_c10d = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    """Sum (or ``op``) of ``x`` over the group, as a new tensor."""
    return wait(_c10d.all_reduce(x.contiguous(), op, group))


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The ranks' ``x`` joined along dim 0."""
    return wait(_c10d.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """This rank's chunk, along dim 0, of the sum of ``x`` over the group."""
    return wait(_c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def wait(x: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _c10d.wait_tensor(x)
    return waited


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """torch 2.13: the mesh that ``mesh`` is a slice of, or ``mesh`` itself."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def fsdp_parameters(unit: FSDPModule) -> list[Any]:
    """torch 2.13: the unit's parameters in the order of its flat reduced gradient.

    Each has ``sharded_param`` and ``padded_sharded_param_size``; the flat gradient holds the trainable ones, each
    padded to that size. The public `set_all_reduce_hook` hands over the flat gradient without saying which is where.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    return list(group.fsdp_params) if group is not None else []
