"""What tests/test_translate.py runs on the pool: style strings applied by torch's own `parallelize_module`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import parity
from shardplan import translate_parallel_style


class Tiny(nn.Module):
    """Embedding, norm, two linears with biases: a residual stream (2, 8, 16) and a width of 12."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 12)
        self.down = nn.Linear(12, 16)

    def forward(self, ids: Tensor) -> Any:
        return self.down(torch.relu(self.up(self.norm(self.embed(ids)))))


def translated(styles: dict[str, str]) -> list[str]:
    torch.manual_seed(0)
    reference = Tiny()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {name: translate_parallel_style(style) for name, style in styles.items()}
    sharded = parallelize_module(Tiny(), mesh, plan)
    ids = torch.arange(16).view(2, 8) % 10
    outputs = [model(ids) for model in (reference, sharded)]
    for output in outputs:
        output.square().mean().backward()
    faults = list(parity.same_logits(*[output.detach() for output in outputs]))
    return faults + list(parity.same_gradients(reference, sharded))


def sequence_parallel_norm() -> list[str]:
    """Each rank norms its half of the sequence; the weight's gradient covers both."""
    torch.manual_seed(0)
    reference, norm = nn.LayerNorm(16), nn.LayerNorm(16)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = parallelize_module(norm, mesh, translate_parallel_style("sequence_parallel"))
    x = torch.randn(2, 8, 16)
    reference(x).square().sum().backward()
    sharded(distribute_tensor(x, mesh, [Shard(1)]).to_local()).square().sum().backward()
    placements = {p.placements for p in sharded.parameters()}  # type: ignore[attr-defined]
    assert placements == {(Replicate(),)}
    return list(parity.same_gradients(reference, sharded))
