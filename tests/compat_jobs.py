"""What tests/test_compat.py runs on the pool: private behaviour of torch that the library leans on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardplan import _compat


def functional_collectives() -> list[bool]:
    """Out of place, by the group's name, along dim 0."""
    group = dist.distributed_c10d._get_default_group().group_name
    rank, own = dist.get_rank(), torch.full((2,), float(dist.get_rank() + 1))
    both = torch.tensor([1.0, 1.0, 2.0, 2.0])
    return [
        torch.equal(_compat.all_reduce(own, group), torch.full((2,), 3.0)),
        torch.equal(_compat.all_reduce(own, group, "max"), torch.full((2,), 2.0)),
        torch.equal(_compat.all_gather(own, group, 2), both),
        torch.equal(_compat.reduce_scatter(both, group, 2), 2 * both.chunk(2)[rank]),
        torch.equal(own, torch.full((2,), float(rank + 1))),
    ]


def root_meshes() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return _compat.root_mesh(mesh["tp"]).size(), _compat.root_mesh(mesh).size()


def flat_gradient() -> tuple[int, int, bool]:
    """Numel of the flat reduced gradient, what the padded parts come to, and whether frozen parameters are left out."""
    unit = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    unit[0].weight.requires_grad_(False)
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(unit, FSDPModule)
    seen: list[Tensor] = []
    unit.set_all_reduce_hook(seen.append)
    unit(torch.ones(4, 3)).sum().backward()
    parameters = _compat.fsdp_parameters(unit)
    trained = [p for p in parameters if p.sharded_param.requires_grad]
    named = [p.sharded_param is q for p, q in zip(parameters, unit.parameters(), strict=True)]
    return seen[0].numel(), sum(p.padded_sharded_param_size.numel() for p in trained), all(named)


def local_gradients() -> list[str]:
    """Where reading a parameter by `_compat.local` differs from torch's own: values, layouts of gradients."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole, x = torch.randn(5, 4), torch.randn(3, 4)
    differences = []
    for placement in (Shard(0), Shard(1), Replicate()):
        own, theirs = (nn.Parameter(distribute_tensor(whole, mesh, [placement])) for _ in range(2))
        read, expected = _compat.local(own), theirs.to_local()
        own_part = x.chunk(2, 1)[dist.get_rank()] if placement == Shard(1) else x
        for part in (read, expected):
            nn.functional.linear(own_part, part).square().sum().backward()
        if not torch.equal(read, expected) or not torch.equal(own.grad.to_local(), theirs.grad.to_local()):
            differences.append(f"{placement}: values")
        if own.grad._spec != theirs.grad._spec or own.grad.stride() != theirs.grad.stride():
            differences.append(f"{placement}: layouts")
    return differences
