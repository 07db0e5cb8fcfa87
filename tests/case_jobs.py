"""What tests/test_cases.py runs on the pool: sizes that do not divide, exact all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import parity
import tiny_models
import tolerances
from pool import build_mesh
from shardplan import apply_plan


class Layers(nn.Module):
    """Two layers of an MLP that a plan may name as it likes."""

    def __init__(self, features: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(features, inner) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, inner), nn.Linear(inner, features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


def uneven_pair(plan: dict[str, str], mesh: str, features: int, inner: int) -> tuple[list[list[int]], list[str]]:
    """The shapes of the first layer's parts on this rank, and which outputs and gradients are not those of one rank."""
    torch.manual_seed(0)
    reference = Layers(features, inner)
    sharded: Any = Layers(features, inner)
    sharded.load_state_dict(reference.state_dict())
    apply_plan(sharded, plan, build_mesh(mesh))
    parts = [list(p.to_local().shape) for p in sharded.layers[0].parameters() if isinstance(p, DTensor)]
    x = torch.randn(2, 3, features)
    outputs = [model(x) for model in (reference, sharded)]
    for output in outputs:
        output.square().sum().backward()
    faults = [] if (outputs[0] - outputs[1]).abs().max() <= tolerances.LOGITS else ["the output differs"]
    return parts, faults + list(parity.same_gradients(reference, sharded))


def vocabulary(case: parity.Case) -> dict[str, Any]:
    """Rows of the head on this rank, its whole weight against the unsharded one, and the contract."""
    model = tiny_models.build(case.model, **case.changes)
    mesh = build_mesh(case.mesh)
    expected = model.lm_head.weight.detach().clone()  # type: ignore[operator,union-attr]
    sharded: Any = case.apply(model, mesh)
    weight, table = sharded.lm_head.weight, sharded.model.embed_tokens.weight
    logits = sharded(**parity.make_inputs(parity.Batch(), vocabulary=parity.vocabulary_of(model))[0]).logits
    return {
        "rows": logits.to_local().shape[-1],
        "width": logits.shape[-1],
        "bit-equal": torch.equal(weight.full_tensor(), expected),
        "tied": weight is table,
        "faults": parity.compare(case, [parity.Batch(), parity.Batch(5, labels=True), parity.Batch(1)]),
    }
