"""What a mutant of a plan really does: real numerics on real processes, by other means than ``--verify``.

Nothing of `shardplan.verify` is used, and neither are its sizes, seeds and meshes: the comparison is that of the parity
suite (tests/parity.py) on its tiny models, over dp and tp. Checks are passed by: the stages of `apply_plan` run as if
they had found nothing.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

import parity
import tiny_models
from alike import effect
from counting import Counting
from mutants import Mutant
from parity import Batch
from pool import build_mesh
from shardplan.apply import apply
from shardplan.compiled import CompiledModule, CompiledPlan
from shardplan.inventory import take_inventory
from shardplan.layouts import REPLICATE, STREAM
from shardplan.lower import lower
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.resolve import resolve
from shardplan.resolved import ResolvedModule, ResolvedPlan

MESH = "dp=2,tp=2"
MODELS = {
    "llama": "llama",
    "qwen2": "qwen3",
    "gemma3": "gemma3-vision",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "nemotron_h": "nemotron-h",
}


FSDP2 = ""


class Weighing(Counting):
    """Also adds up the bytes of the tensors that collectives are called with, by group; FSDP2's under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and not any(issubclass(kind, DTensor) for kind in types):
            group = next((arg for arg in reversed(args) if isinstance(arg, str)), FSDP2)
            tensors, _ = tree_flatten(args)
            self.bytes[group] += sum(_nbytes(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True)
class Cost:
    """What a step costs one rank.

    Attributes:
        parameters: bytes that it holds.
        tp_calls, tp_bytes: collectives over tp, and what is put into them.
        fsdp_bytes: what is put into FSDP2's.
        unit: bytes of the largest unit once FSDP2 has gathered it.
    """

    parameters: int
    tp_calls: int
    tp_bytes: int
    fsdp_bytes: int
    unit: int

    def wastes(self, base: Cost) -> str:
        """What is worse than at ``base``; smaller units that send more are a trade, and no waste."""
        if self.parameters > base.parameters:
            return f"holds {self.parameters} bytes of parameters, not {base.parameters}"
        if self.tp_calls > base.tp_calls or self.tp_bytes > base.tp_bytes:
            return f"sends {self.tp_bytes} bytes in {self.tp_calls} calls, not {base.tp_bytes} in {base.tp_calls}"
        if self.unit > base.unit:
            return f"gathers {self.unit} bytes at once, not {base.unit}"
        if self.fsdp_bytes > base.fsdp_bytes and self.unit >= base.unit:
            return f"FSDP2 sends {self.fsdp_bytes} bytes, not {base.fsdp_bytes}"
        return ""


@dataclass(frozen=True)
class Seen:
    """What was seen of one mutant in one mode: what is wrong, what it costs, whether its rule does nothing."""

    wrong: str
    cost: Cost | None
    idle: bool


class Watch:
    """Whether a gradient passes any edge that a rule states: where none does, nothing reads what it converts."""

    def __init__(self, sharded: nn.Module, edges: Sequence[tuple[str, str]]) -> None:
        """``edges``: modules by path, and which side of them."""
        self.edges = edges
        self.passed = 0
        for path, side in edges:
            module = sharded.get_submodule(path)
            if side == "input":
                module.register_forward_pre_hook(lambda _, args, kwargs: self._follow((args, kwargs)), with_kwargs=True)
            else:
                module.register_forward_hook(lambda _, args, output: self._follow(output))

    def _follow(self, tensors: Any) -> None:
        converted = next((t for t in tree_flatten(tensors)[0] if isinstance(t, torch.Tensor)), None)
        if converted is not None and converted.requires_grad:
            converted.register_hook(self._count)

    def _count(self, gradient: torch.Tensor) -> None:
        self.passed += 1

    @property
    def useless(self) -> bool:
        return bool(self.edges) and self.passed == 0


def look(mutants: list[Mutant], sequence_parallel: bool) -> list[Seen]:
    """On each rank, one mutant after the other; a mutant that raises on one rank does so on all of them."""
    return [_look(mutant, sequence_parallel) for mutant in mutants]


_KNOWN: dict[object, Seen] = {}  # of what was run: mutants with one effect, and one edge to watch, are run once


def _look(mutant: Mutant, sequence_parallel: bool) -> Seen:
    name = MODELS[mutant.plan]
    model = tiny_models.build(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(mutant.source)
        try:
            resolved = resolve(read_plan(path), take_inventory(model))
        except ValueError as refused:
            return Seen(f"no plan: {refused}", None, False)
    try:
        compiled = lower(resolved, parse_mesh(MESH), sequence_parallel=sequence_parallel)
        idle = _idle(resolved, compiled, mutant.written, sequence_parallel)
    except Exception as error:  # noqa: BLE001 - as below
        return Seen(_raised(error), None, False)
    stated = tuple((lowered.path, side) for lowered, side in _stated(resolved, compiled, mutant.written))
    key = name, effect(compiled), stated
    if key not in _KNOWN:
        _KNOWN[key] = _run(name, model, compiled, stated)
    seen = _KNOWN[key]
    return replace(seen, idle=seen.idle or idle)


def _run(name: str, model: nn.Module, compiled: CompiledPlan, stated: Sequence[tuple[str, str]]) -> Seen:
    try:
        mesh = build_mesh(MESH)
        sharded = apply(model, compiled, mesh)
        faults = _faults(parity.kept(name, {}), sharded, mesh)
        watch = Watch(sharded, stated)
        cost = _cost(sharded, compiled, mesh)
        return Seen(faults[0] if faults else "", cost, watch.useless)
    except Exception as error:  # noqa: BLE001 - that it raises is what is to be found out
        return Seen(_raised(error), None, False)


def _raised(error: Exception) -> str:
    return f"raises {type(error).__name__}: {str(error)[:200]}"


def _faults(reference: parity.Reference, sharded: nn.Module, mesh: parity.DeviceMesh) -> list[str]:
    faults = list(parity.same_names(reference.model, sharded))
    images = hasattr(reference.model.config, "vision_config")
    for number, batch in enumerate((Batch(length=12, mask=True), Batch(length=7), Batch(length=16, image=images))):
        faults += parity.compare_batch(reference, sharded, mesh, batch, seed=50 + number)
        if faults:
            return faults
    return faults + list(parity.compare_accumulation(reference, sharded, mesh))


def _idle(resolved: ResolvedPlan, compiled: CompiledPlan, written: str, sequence_parallel: bool) -> bool:
    """Whether the written rule does nothing: it decides about no parameter and converts nothing in either mode.

    So does one that states a layout that is not there and that nothing converts to, an alternative of one that matches
    nothing, and a unit that does. A rule that only guards, such as ``rotary`` for position tables, is not idle.
    """
    own = (rule for rule in resolved.rules if str(rule.line.pattern) == written)
    required = (matched for matched in (*resolved.units, *own) if not matched.line.pattern.optional)
    if any(not match.fqns for matched in required for match in matched.matches):
        return True
    spoken = _spoken(resolved, written)
    claims = {str(p.claim.pattern) for m in resolved.modules for p in m.parameters if p.claim}
    by_fqn = compiled.by_fqn
    if not written:
        return False
    whole = [module for module in spoken if not module.part]
    if any(_untrue(module, by_fqn[module.fqn], side, sequence_parallel) for module in whole for side in SIDES):
        return True
    works = any(_works(module, by_fqn[module.fqn]) for module in spoken if _holds_parameters(resolved, module))
    works = works or any(module.style and module.style.positions for module in spoken)
    return not works and written not in claims


def _spoken(resolved: ResolvedPlan, written: str) -> list[ResolvedModule]:
    return [m for m in resolved.modules if m.rule and str(m.rule.pattern) == written]


def _stated(resolved: ResolvedPlan, compiled: CompiledPlan, written: str) -> Iterator[tuple[CompiledModule, str]]:
    """The edges that a rule states and that convert something, each with its module."""
    for module in _spoken(resolved, written):
        lowered = compiled.by_fqn[module.fqn]
        for side in SIDES:
            edge = getattr(lowered, side)
            if getattr(module.rule, side) and edge and edge.in_mode(compiled.sequence_parallel):
                yield lowered, side


SIDES = ("input", "output")


def _holds_parameters(resolved: ResolvedPlan, module: ResolvedModule) -> bool:
    prefix = f"{module.fqn}." if module.fqn else ""
    return any(p.fqn.startswith(prefix) for p in resolved.inventory.parameters)


def _works(module: ResolvedModule, compiled: CompiledModule) -> bool:
    """Whether a rule has edges; a style's own are idle where it has nothing to split."""
    assert module.rule is not None
    assert module.style is not None
    stated = bool(module.rule.input or module.rule.output)
    edges = compiled.edges and (stated or module.style.opens_block or module.info.parameters)
    return bool(edges)


def _untrue(module: ResolvedModule, compiled: CompiledModule, side: str, sequence_parallel: bool) -> bool:
    """Whether a stated edge does nothing and is not what the style does there in any case."""
    stated = getattr(module.rule, side)
    edge = getattr(compiled, side)
    if stated is None or (edge is not None and edge.in_mode(sequence_parallel) is not None):
        return False
    own = getattr(module.style, side)
    there = STREAM if module.fqn.rpartition(".")[2].isdigit() else REPLICATE  # around a decoder layer, or elsewhere
    inner = there if own is None else own.target if side == "input" else own.source
    ends = {end.resolved(sequence_parallel) for end in (stated.source, stated.target)}
    return ends != {inner.resolved(sequence_parallel)}


def _cost(sharded: nn.Module, compiled: CompiledPlan, mesh: parity.DeviceMesh) -> Cost:
    inputs, targets = parity.make_inputs(Batch(length=16))
    own = {name: parity.rows_of(value, mesh) for name, value in inputs.items()}
    sharded.zero_grad()
    with Weighing() as weighing:
        parity.step(sharded, own, parity.rows_of(targets, mesh))
    tp = mesh["tp"].get_group().group_name
    held = {id(p): p for p in sharded.parameters()}
    calls = sum(number for (group, _), number in weighing.ours.items() if group == tp)
    return Cost(
        parameters=sum(_nbytes(p.to_local() if isinstance(p, DTensor) else p) for p in held.values()),
        tp_calls=calls,
        tp_bytes=weighing.bytes[tp],
        fsdp_bytes=weighing.bytes[FSDP2],
        unit=max(_unit_bytes(sharded, compiled).values()),
    )


def _unit_bytes(sharded: nn.Module, compiled: CompiledPlan) -> Counter[str]:
    """Bytes of each FSDP2 unit over its own parameters, whole over dp."""
    units = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
    sizes: Counter[str] = Counter()
    tp = compiled.mesh.tp
    for parameter in compiled.parameters:
        around = max((unit for unit in units if parameter.fqn.startswith(f"{unit}." if unit else "")), key=len)
        sizes[around] += parameter.nbytes // (tp if parameter.sharded else 1)
    return sizes


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
