"""What ranks do in tests of checkpoints: folders of weights in and out, and training that stops and goes on."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import FalconH1Config, FalconH1ForCausalLM

import parity
import tiny_models
from pool import build_mesh
from shardplan import (
    CheckpointError,
    Resumed,
    apply_plan,
    hf_state_dict,
    load_checkpoint,
    load_hf_state_dict,
    load_weights,
    save_checkpoint,
    save_weights,
)
from shardplan.weights import join, stored_parameters

STEPS, HALF = 10, 5
Tensors = dict[str, Tensor]


def meta_model(name: str, mesh: DeviceMesh, plan: Any = None, **changes: Any) -> nn.Module:
    return apply_plan(tiny_models.build_meta(name, **changes), plan or tiny_models.plan_of(name), mesh)


# ---------------------------------------------------------------- weights


def through(name: str, source: str, targets: dict[str, str], changes: dict[str, Any]) -> None:
    """From a folder into a sharded model and out into another, on each mesh."""
    for mesh, target in targets.items():
        model = meta_model(name, build_mesh(mesh), **changes)
        load_weights(model, source)
        save_weights(model, target, max_shard_bytes=100_000)


def loaded(name: str, mesh_text: str, source: str, changes: dict[str, Any]) -> list[str]:
    """What a model that was built on the meta device and loaded does otherwise than the unsharded one."""
    mesh = build_mesh(mesh_text)
    model, reference = meta_model(name, mesh, **changes), tiny_models.build(name, **changes)
    load_weights(model, source)
    tied = len({id(p) for p in model.parameters()}), len({id(p) for p in reference.parameters()})
    faults = [f"{tied[0]} parameters, not {tied[1]}"] if tied[0] != tied[1] and not stored_apart(model) else []
    compared = parity.Reference(reference)
    faults += parity.compare_batch(compared, model, mesh, parity.Batch(), seed=0)
    return faults + list(parity.compare_training(compared, model, mesh))


def stored_apart(model: nn.Module) -> bool:
    return any(len(entry.parts) > 1 for entry in stored_parameters(model).values())


def loaded_again(name: str, mesh_text: str, source: str | None) -> list[str]:
    """The same of a model that has other weights, and gathered copies of some: its last forward had no backward."""
    mesh = build_mesh(mesh_text)
    model, reference = tiny_models.build(name), tiny_models.build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2)
    apply_plan(model, tiny_models.plan_of(name), mesh)
    with torch.no_grad():
        model(input_ids=parity.make_inputs(parity.Batch())[0]["input_ids"])
    if source is not None:
        load_weights(model, source)
    else:
        load_hf_state_dict(model, reference.state_dict())
    faults, compared = [], parity.Reference(reference)
    for seed in range(2):  # the second forward gathers again
        faults += parity.compare_batch(compared, model, mesh, parity.Batch(), seed)
    return faults


def offloaded(name: str, mesh_text: str, source: str, target: str) -> None:
    model = tiny_models.build_meta(name)
    apply_plan(model, tiny_models.plan_of(name), build_mesh(mesh_text), cpu_offload=True)
    load_weights(model, source)
    save_weights(model, target)


def in_dtype(name: str, mesh_text: str, source: str, target: str, dtype: torch.dtype) -> None:
    model = tiny_models.build_meta(name).to(dtype)
    apply_plan(model, tiny_models.plan_of(name), build_mesh(mesh_text))
    load_weights(model, source)
    save_weights(model, target)


def falcon_h1() -> nn.Module:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    scales = {"ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]}
    return FalconH1ForCausalLM(FalconH1Config(**sizes, **heads, **mamba, **scales))


FALCON_H1 = {
    "model.layers.*.feed_forward": "block",
    "model.layers.*.feed_forward.{gate,up}_proj": "colwise",
    "model.layers.*.feed_forward.down_proj": "rowwise",
}


def loaded_falcon_h1(source: str) -> tuple[Tensors, Tensors, bool]:
    """Weights and buffers of one that was loaded from the meta device; whether that drew random numbers."""
    with torch.device("meta"):
        model = falcon_h1()
    apply_plan(model, FALCON_H1, build_mesh("tp=2"))
    before = torch.get_rng_state()
    load_weights(model, source)
    drew = not torch.equal(before, torch.get_rng_state())
    return dict(hf_state_dict(model)), {name: buffer.clone() for name, buffer in model.named_buffers()}, drew


class Plain(nn.Module):
    """None of transformers' models, with a buffer that nobody saves where it is ``odd``."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        if odd:
            self.register_buffer("table", torch.arange(8.0), persistent=False)


def plain(source: str, target: str, odd: bool) -> str:
    with torch.device("meta"):
        model = Plain(odd)
    plan = {"mlp": "block", "mlp.0": "colwise", "mlp.1": "rowwise"}
    apply_plan(model, plan, build_mesh("dp=2,tp=2"))
    try:
        load_weights(model, source)
    except CheckpointError as error:
        return str(error)
    save_weights(model, target)
    return ""


# ---------------------------------------------------------------- training


def stopped(name: str, mesh_text: str, folder: str, asynchronous: bool) -> tuple[Tensors, list[float], list[float]]:
    """Ten steps with a checkpoint in the middle: what was saved, what came after it, and random numbers drawn then."""
    mesh = build_mesh(mesh_text)
    model = apply_plan(tiny_models.build(name), tiny_models.plan_of(name), mesh)
    optimizer, scheduler = trainer(model)
    train(model, optimizer, scheduler, mesh, range(HALF))
    before = everything(model, optimizer)
    saving = save_checkpoint(folder, model, optimizer, step=HALF, scheduler=scheduler, asynchronous=asynchronous)
    numbers = drawn()
    losses = train(model, optimizer, scheduler, mesh, range(HALF, STEPS))
    if saving is not None:
        saving.wait()
    return before, losses, numbers


def resumed(
    name: str, mesh_text: str, folder: str, plan: Any = None
) -> tuple[Tensors, list[float], list[float], Resumed, list[str]]:
    """The second half of it, by a model that begins on the meta device; and what was logged."""
    mesh = build_mesh(mesh_text)
    model = meta_model(name, mesh, plan)
    load_checkpoint(folder, model)
    optimizer, scheduler = trainer(model)
    with logged() as messages:
        found = load_checkpoint(folder, model, optimizer, scheduler=scheduler)
    numbers = drawn()
    state = everything(model, optimizer)
    return state, train(model, optimizer, scheduler, mesh, range(HALF, STEPS)), numbers, found, messages


def widened(kind: str, folder: str) -> list[str]:
    """What a run in bfloat16 has otherwise when it goes on in float32; a step of that shows whether it can."""
    states: list[Tensors] = []
    for dtype, mesh_text in ((torch.bfloat16, "dp=2,tp=2"), (torch.float32, "tp=4")):
        mesh = build_mesh(mesh_text)
        model = apply_plan(tiny_models.build("phi3").to(dtype), tiny_models.plan_of("phi3"), mesh)
        optimizer = make_optimizer(kind, model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        if states:
            load_checkpoint(folder, model, optimizer)
        else:
            train(model, optimizer, scheduler, mesh, range(2))
            save_checkpoint(folder, model, optimizer, step=2)
        states.append(everything(model, optimizer))
    train(model, optimizer, scheduler, mesh, range(2, 3))
    saved, read = states
    return [
        f"{name}: {tensor.dtype}"
        for name, tensor in read.items()
        if tensor.dtype != torch.float32 or not torch.equal(tensor, saved[name].float())
    ]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=parity.LR, **options)
    return made


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardplan").addHandler(handler)
    yield messages
    logging.getLogger("shardplan").removeHandler(handler)


def trainer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Two groups, and a learning rate that falls at every step."""
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=parity.LR)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def train(model: nn.Module, optimizer: Any, scheduler: Any, mesh: DeviceMesh, steps: range) -> list[float]:
    losses = []
    for number in steps:
        inputs, targets = parity.make_inputs(parity.Batch(), number, parity.vocabulary_of(model))
        own = {key: parity.rows_of(value, mesh) for key, value in inputs.items()}
        loss = parity.step(model, own, parity.rows_of(targets, mesh)).loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), parity.CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(parity.mean_over_dp(parity.whole(loss), mesh).item())
    return losses


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Weights and optimizer state as the unsharded model has them."""
    tensors = dict(hf_state_dict(model))
    for name, entry in stored_parameters(model).items():
        for key, first in optimizer.state[entry.parts[0]].items():
            parts = tuple(optimizer.state[part][key] for part in entry.parts)
            tensors[f"{name} {key}"] = join(parts, entry.dim) if first.ndim else torch.stack(parts).unique()
    return tensors


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def run_page(blocks: list[str], folder: str) -> int:
    """The code of a page in a folder: the step that it went on from."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for block in blocks:
            exec(block, names)  # noqa: S102
    done: int = names["done"]
    return done
