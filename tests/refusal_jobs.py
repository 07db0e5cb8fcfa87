"""What tests/test_apply.py runs on the pool: calls that are refused, and leave the model as it was."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tiny_models
from pool import build_mesh
from shardplan import PlanError, apply_plan


def fingerprint(model: nn.Module) -> str:
    """Everything that applying a plan changes: parameters, hooks, classes, attributes."""
    facts = []
    for name, module in model.named_modules():
        facts.append((name, type(module).__name__, sorted(module.__dict__)))
        facts.append((len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                facts.append((key, id(parameter), type(parameter).__name__, parameter.detach().double().sum().item()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def refused(call: str) -> tuple[list[str], str, bool]:
    """The codes and the text of a refusal, and whether the model is as it was."""
    model = tiny_models.build("llama")
    PREPARATIONS.get(call, lambda model: None)(model)
    before = fingerprint(model)
    try:
        REFUSED_CALLS[call](model)
    except PlanError as error:
        return [d.code for d in error.diagnostics], str(error), fingerprint(model) == before
    return [], "", False


def _unequal_weights(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] += 1e-3 * dist.get_rank()


def _permuted_rows(model: nn.Module) -> None:
    """The same numbers in another order."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            weight = model.get_parameter("model.norm.weight")
            weight.copy_(weight.flip(0))


def _other_mode(model: nn.Module) -> None:
    apply_plan(model, "llama", build_mesh("tp=2"), sequence_parallel=dist.get_rank() == 1)


def _one_rank_refuses(model: nn.Module) -> None:
    apply_plan(model, "llama" if dist.get_rank() else {"nothing": "colwise"}, build_mesh("tp=2"))


def _smaller_mesh(model: nn.Module) -> None:
    apply_plan(model, "llama", DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp")))


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Callable[[nn.Module], Any]:
    return lambda model: apply_plan(model, "llama", init_device_mesh("cpu", shape, mesh_dim_names=names))


def _on_tp(plan: Any = "llama", **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: apply_plan(model, plan, build_mesh("tp=2"), **options)


def _file(text: str) -> Callable[[nn.Module], Any]:
    def call(model: nn.Module) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.yaml"
            path.write_text(text)
            apply_plan(model, path, build_mesh("tp=2"))

    return call


PREPARATIONS: dict[str, Callable[[nn.Module], None]] = {
    "unequal weights": _unequal_weights,
    "permuted rows": _permuted_rows,
}
REFUSED_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "unequal weights": _on_tp(),
    "permuted rows": _on_tp(),
    "ranks in different modes": _other_mode,
    "one rank refuses": _one_rank_refuses,
    "a mesh smaller than the world": _smaller_mesh,
    "an unnamed mesh": _mesh((2,), None),
    "an unknown axis": _mesh((1, 2), ("dp", "ep")),
    "two names for dp": _mesh((1, 1, 2), ("dp", "fsdp", "tp")),
    "a plan for another model": _on_tp("gemma3"),
    "a missing file": _on_tp("nowhere.yaml"),
    "a directory": _on_tp("/"),
    "no shipped plan of that name": _on_tp("lama"),
    "not YAML": _file("format: 1\nrules: {a: [\n"),
    "a YAML list": _file("- format: 1\n"),
    "an empty file": _file(""),
    "an unknown key": _file("format: 1\nrulez: {}\n"),
    "a wrong type": _file("format: 1\nrules: [a, b]\n"),
    "an empty dict": _on_tp({}),
    "a dict of numbers": _on_tp({"model.norm": 3}),
    "an unknown style": _on_tp(["llama", {".layers.*.mlp.up_proj": "colwize"}]),
    "mixed precision without dp": _on_tp(mixed_precision={"param": "bfloat16"}),
    "offload without dp": _on_tp(cpu_offload=True),
    "recompute of nothing": _on_tp(recompute=[".layer.*"]),
    "recompute as a flag": _on_tp(recompute=True),
}


def applied_twice() -> tuple[list[str], bool]:
    mesh = build_mesh("tp=2")
    model = apply_plan(tiny_models.build("llama"), "llama", mesh)
    before = fingerprint(model)
    try:
        apply_plan(model, "llama", mesh)
    except PlanError as error:
        return [d.code for d in error.diagnostics], fingerprint(model) == before
    return [], False
