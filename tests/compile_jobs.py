"""What tests/test_compile.py runs on the pool."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.utils import counters

import parity
import tiny_models
from parity import Batch, Case
from pool import build_mesh


def compiled(case: Case, batch: Batch) -> tuple[int, list[str]]:
    """How many graphs the decoder layers came to, and every violation of the contract.

    Each layer is compiled with ``fullgraph``, its backward by AOTAutograd: a graph break raises.
    """
    torch._dynamo.reset()
    counters.clear()
    mesh = build_mesh(case.mesh)
    reference, sharded = parity.kept(case.model, {}), case.apply(tiny_models.build(case.model), mesh)
    for layer in layers(sharded):
        layer.compile(backend="aot_eager", fullgraph=True)
    faults = list(parity.compare_batch(reference, sharded, mesh, batch, seed=0))
    assert not counters["graph_break"], counters["graph_break"]
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs, faults


def breaks_on_purpose(case: Case) -> str:
    """What a layer says that cannot be one graph: that such a layer is noticed."""
    torch._dynamo.reset()
    sharded = case.apply(tiny_models.build(case.model), build_mesh(case.mesh))
    first = layers(sharded)[0]
    next(first.children()).register_forward_hook(lambda *_: torch._dynamo.graph_break())
    first.compile(backend="eager", fullgraph=True)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    try:
        sharded(input_ids=ids, use_cache=False)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return ""


def layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the members of the longest list."""
    longest = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    return list(longest)
