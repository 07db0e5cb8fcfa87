"""What tests/test_benchmarks.py runs on the pool: the contestants of tests/benchmarks/speed.py, judged and counted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import parity
import tolerances

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import contestants
import speed

from pool import build_mesh

HIDDEN, LENGTH, ROWS = 64, 16, 2


def judged(name: str, mesh_text: str, sequence_parallel: bool) -> tuple[list[str], int, int]:
    """Gradients that are not the unsharded model's, and a step's collectives over tp with the bytes put in."""
    mesh = build_mesh(mesh_text)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, contestants.VOCABULARY, (ROWS, LENGTH), generator=generator)
    gradient = torch.randn(ROWS, LENGTH, contestants.VOCABULARY, generator=generator)
    reference, model = contestants.build(HIDDEN), contestants.CONTESTANTS[name](HIDDEN, mesh, sequence_parallel)
    contestants.step(reference, ids, gradient)
    contestants.step(model, ids, _own_columns(gradient, mesh, name))
    parameters: dict[str, Any] = dict(model.named_parameters())
    departs = []
    for fqn, parameter in reference.named_parameters():
        assert parameter.grad is not None
        found = parity.whole(parameters[fqn].grad)
        wanted = _own_part(parameter.grad, found.shape, mesh)
        if not (found - wanted).norm() <= tolerances.GRADIENT * wanted.norm():
            departs.append(fqn)
    dp = mesh.get_group("dp").group_name if "dp" in (mesh.mesh_dim_names or ()) else None
    return departs, *speed.sent(model, ids, gradient, dp)


def _own_columns(gradient: torch.Tensor, mesh: DeviceMesh, name: str) -> torch.Tensor:
    """What this rank's part of the logits gets; transformers' own plan gathers them."""
    return gradient if name == "transformers" else gradient.chunk(mesh["tp"].size(), -1)[mesh.get_local_rank("tp")]


def _own_part(whole: torch.Tensor, shape: torch.Size, mesh: DeviceMesh) -> torch.Tensor:
    """Of a gradient, where a contestant keeps plain tensors."""
    cut = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]]
    return whole.chunk(mesh["tp"].size(), cut[0])[mesh.get_local_rank("tp")] if cut else whole
