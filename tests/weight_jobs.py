"""What ranks do in tests of weights: out under the unsharded names, in again, and through torch's checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import parity
import tiny_models
from parity import Batch
from pool import build_mesh
from shardplan import apply_plan, hf_state_dict, load_hf_state_dict

Tensors = dict[str, Tensor]


def sharded(name: str, mesh: Any, seed_of_weights: int = 0) -> nn.Module:
    model = tiny_models.build(name)
    if seed_of_weights:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(seed_of_weights)
    return apply_plan(model, tiny_models.plan_of(name), mesh)


def written(name: str, mesh_text: str, folder: str) -> tuple[Tensors, Tensors]:
    """Two AdamW steps, then a checkpoint of weights and optimizer: both as they were written."""
    mesh = build_mesh(mesh_text)
    model = sharded(name, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        inputs, targets = parity.make_inputs(Batch(), number)
        optimizer.zero_grad()
        parity.step(model, {key: parity.rows_of(value, mesh) for key, value in inputs.items()},
                    parity.rows_of(targets, mesh))  # fmt: skip
        optimizer.step()
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    return dict(hf_state_dict(model)), _whole_state(model, optimizer)


def read(name: str, mesh_text: str, folder: str) -> tuple[Tensors, Tensors]:
    """The same checkpoint read into a model with other weights on another mesh."""
    mesh = build_mesh(mesh_text)
    model = sharded(name, mesh, seed_of_weights=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the state that is then read
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return dict(hf_state_dict(model)), _whole_state(model, optimizer)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    state: dict[str, dict[str, Tensor]] = get_optimizer_state_dict(model, optimizer)["state"]  # type: ignore[assignment]
    return {f"{name} {key}": parity.whole(value) for name, own in state.items() for key, value in own.items()}


def out(name: str, mesh_text: str) -> list[tuple[str, Tensor]]:
    return list(hf_state_dict(sharded(name, build_mesh(mesh_text))))


def out_and_in(name: str, mesh_text: str, streaming: bool) -> list[tuple[str, Tensor]]:
    """Another model's weights, as the unsharded model has them, through a sharded one."""
    model = sharded(name, build_mesh(mesh_text), seed_of_weights=3)
    given = tiny_models.build(name).state_dict()
    load_hf_state_dict(model, iter(given.items()) if streaming else given)
    return list(hf_state_dict(model))


def refused(name: str, mesh_text: str, change: str) -> tuple[str, bool]:
    """What is said of tensors that are not the model's, and whether the model is as before."""
    model = sharded(name, build_mesh(mesh_text))
    before = dict(hf_state_dict(model))
    given = {key: torch.zeros_like(value) for key, value in before.items()}
    first = next(iter(given))
    if change == "missing":
        del given[first]
    elif change == "unknown":
        given["nobody.weight"] = torch.zeros(1)
    else:
        given[first] = given[first][:-1]
    try:
        load_hf_state_dict(model, given)
    except ValueError as error:
        after = dict(hf_state_dict(model))
        return str(error), all(torch.equal(before[key], after[key]) for key in before)
    return "", False
