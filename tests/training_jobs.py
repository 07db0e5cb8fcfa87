"""What tests/test_training.py runs on the pool: 20 clipped AdamW steps of two micro-batches, sharded and alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import parity
import tiny_models
from pool import build_mesh
from shardplan import clip_grad_by_total_norm_, get_grad_norm, log_probs

STEPS = 20
LENGTHS = (16, 5)  # of a step's micro-batches; tp divides the first one only
DIFFERENT = 2  # steps until the batches return: the loss falls, and what is wrong with a gradient shows in it
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def alone(model_name: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of each step, in one process, in fp32."""
    return train(tiny_models.build(model_name), None)


def sharded(model_name: str, mesh_text: str, bf16: bool) -> tuple[list[float], list[float], list[str]]:
    """The same on a mesh; and which replicas, of parameters and optimizer state, differ at the end."""
    options = {"mixed_precision": BF16} if bf16 else {}
    case = parity.Case(model_name, mesh_text, sequence_parallel=True, options=options)
    mesh = build_mesh(mesh_text)
    model = case.apply(tiny_models.build(model_name), mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=parity.LR, fused=True)
    losses, norms = train(model, mesh, optimizer)
    state = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items()
    }
    return losses, norms, list(parity.different_replicas(state))


def train(
    model: nn.Module, mesh: DeviceMesh | None, optimizer: torch.optim.Optimizer | None = None
) -> tuple[list[float], list[float]]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=parity.LR, fused=True)
    losses, norms = [], []
    for number in range(STEPS):
        losses.append(sum(micro_batch(model, mesh, number, which) for which in range(len(LENGTHS))))
        norms.append(get_grad_norm(model.parameters()))
        clip_grad_by_total_norm_(model.parameters(), parity.CLIP, norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def micro_batch(model: nn.Module, mesh: DeviceMesh | None, number: int, which: int) -> float:
    """One forward and backward; its share of the step's mean loss."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(which == len(LENGTHS) - 1)
    inputs, targets = parity.make_inputs(
        parity.Batch(length=LENGTHS[which]), seed=number % DIFFERENT * len(LENGTHS) + which
    )
    if mesh is not None:
        inputs, targets = {name: parity.rows_of(x, mesh) for name, x in inputs.items()}, parity.rows_of(targets, mesh)
    loss: Tensor = parity.step(model, inputs, targets, weight=1 / len(LENGTHS)).loss.detach() / len(LENGTHS)
    return (loss if mesh is None else parity.mean_over_dp(loss, mesh)).item()


def run_code(blocks: list[str]) -> dict[str, Any]:
    """The code of a page, as one script; what it leaves of plain numbers."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(block, names)  # noqa: S102
    return {name: value for name, value in names.items() if isinstance(value, (int, float, list)) and name[0] != "_"}


def log_probs_by(expression: str) -> float:
    """The largest difference between an expression on a sharded model's logits and the unsharded one's."""
    ids = torch.arange(32).view(2, 16)
    expected = tiny_models.build("llama")(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    model = parity.Case("llama", "tp=2", sequence_parallel=True).apply(tiny_models.build("llama"), build_mesh("tp=2"))
    logits = model(input_ids=ids).logits
    actual = eval(expression, {"log_probs": log_probs, "logits": logits, "input_ids": ids})
    return (actual - expected.squeeze(-1)).abs().max().item()
