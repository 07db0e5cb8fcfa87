"""The ranks of a mesh, pretended: a process group whose collectives return at once and move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardplan import _compat
from shardplan.diagnostics import Diagnostic, PlanError
from shardplan.mesh import MeshSpec


@contextmanager
def fake_ranks(spec: MeshSpec) -> Iterator[DeviceMesh]:
    """The mesh that ``spec`` describes, of which this process is rank 0; gone afterwards.

    Raises:
        PlanError: SP904, this process is one of a process group already. That group is left alone.
    """
    if dist.is_initialized():
        raise PlanError([_occupied()])
    dist.init_process_group("fake", store=_compat.fake_store(), rank=0, world_size=spec.size)
    try:
        names, sizes = zip(*spec.axes, strict=True)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        _compat.forget_meshes()


def _occupied() -> Diagnostic:
    return Diagnostic(
        "SP904",
        "this process belongs to a process group already, and a dry run pretends one of its own",
        expected="a process without torch.distributed initialised",
        hint="run plan-compile --dry-run by itself, or before init_process_group",
    )
