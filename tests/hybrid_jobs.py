"""What tests/test_hybrid_parity.py runs on the pool: Mamba-2 mixers on their fused path, and under mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import mamba_kernels
import parity
import tiny_models
import tolerances
from pool import build_mesh

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fused(case: parity.Case, batches: list[parity.Batch]) -> tuple[list[str], dict[str, float]]:
    """The parity contract with both models on the fused path, and each kernel's calls in a forward of both."""
    with mamba_kernels.installed() as calls:
        faults = parity.compare(case, batches, afresh=True)
    assert "dp" not in case.mesh
    assert not case.training
    forwards = len(batches) + 2  # and two micro-batches
    return faults, {kernel: number / forwards for kernel, number in calls.items()}


def in_bf16(mesh_text: str, sequence_parallel: bool) -> dict[str, Any]:
    """Dtypes under bf16 parameters and fp32 reduction, the difference from the fp32 loss, and replicas that differ."""
    case = parity.Case("nemotron-h", mesh_text, sequence_parallel, options={"mixed_precision": BF16})
    mesh = build_mesh(mesh_text)
    reference, sharded = tiny_models.build(case.model), case.apply(tiny_models.build(case.model), mesh)
    assert isinstance(sharded, FSDPModule)
    inputs, targets = parity.make_inputs(parity.Batch())
    expected = parity.step(reference, inputs, targets).loss.detach()
    own = {name: parity.rows_of(value, mesh) for name, value in inputs.items()}
    actual = parity.mean_over_dp(parity.step(sharded, own, parity.rows_of(targets, mesh)).loss.detach(), mesh)
    gradients = {name: p.grad for name, p in sharded.named_parameters() if p.grad is not None}
    return {
        "parameters": {p.dtype for p in sharded.parameters()},
        "gradients": {gradient.dtype for gradient in gradients.values()},
        "finite": all(parity.whole(gradient).isfinite().all() for gradient in gradients.values()),
        "replicas": list(parity.different_replicas(gradients)),
        "close": 0 < abs(actual.item() - expected.item()) <= tolerances.BF16 * expected.item(),
    }
