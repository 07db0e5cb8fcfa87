"""Guarantees broken on purpose, each by one patch inside a worker: what the tests must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp import FSDPModule

import communication
import hybrid_jobs
import parity
import tiny_models
from pool import build_mesh
from shardplan import lower
from shardplan.apply import APPLIED
from shardplan.compiled import CompiledModule, CompiledSection
from shardplan.edges import Collective
from shardplan.layouts import Conversion
from shardplan.parallel import collectives, local, recompute, style
from shardplan.resolved import ResolvedModule
from shardplan.styles import Kind, Split, Style

_place = style.LocalStyle._place


def _place_without_memory(self: style.LocalStyle, *args: Any) -> None:
    self.placed.clear()
    _place(self, *args)


def _own_input_inside_blocks(module: ResolvedModule) -> Conversion | None:
    if module.rule is None or module.style is None or module.info.kind is Kind.EMBEDDING:
        return None
    return module.rule.input or module.style.input


def _nothing(*args: Any) -> None:
    return None


def _gather_twice(x: Any, dim: int, ranks: Any) -> Any:
    collectives.all_gather(x, dim, ranks)
    return collectives.all_gather(x, dim, ranks)


def _only_the_first(layers: Any) -> list[Any]:
    return [layers] if isinstance(layers, str) else []


def _unchanged(x: Any, *args: Any) -> Any:
    return x


_split_sections = style.split_sections
_localise = style.localise
_sections = lower._Lowering._sections


def _swap_the_last_two_sections(module: Any, compiled: CompiledModule) -> None:
    """Where they are of one length: nothing but the numbers can tell."""
    parameters = []
    for parameter in compiled.parameters:
        *others, first, second = parameter.sections or (None, None)
        if first and second and first.length == second.length:
            swapped = (replace(first, start=second.start), replace(second, start=first.start))
            parameters.append(replace(parameter, sections=(*others, *swapped)))
        else:
            parameters.append(parameter)
    _split_sections(module, replace(compiled, parameters=tuple(parameters)))


def _all_but_the_groups(module: Any, sizes: Any, ranks: Any) -> None:
    _localise(module, [size for size in sizes if size.name != "n_groups"], ranks)


def _none_of_a_convolution(self: Any, style: Any, fqn: str, whole: int) -> Iterator[CompiledSection]:
    return iter(()) if fqn.endswith("conv1d") else _sections(self, style, fqn, whole)


def _gather_of_one_ranks_gradient(forward: str, backward: str, **where: Any) -> Collective:
    return Collective(forward, "chunk", **where)


BREAKAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "skip the sum of replicated gradients, tp alone": lambda: patch("shardplan.apply.sum_in_graph", _nothing),
    "skip the sum of replicated gradients, FSDP2": lambda: patch("shardplan.apply.sum_in_units", _nothing),
    "untie a weight": lambda: patch.object(style.LocalStyle, "_place", _place_without_memory),
    "ignore the FSDP2 units": lambda: patch("shardplan.lower._units", lambda matched: ()),
    "gather twice": lambda: patch.dict(collectives.OPERATIONS, all_gather=_gather_twice),
    "sum in each linear": lambda: patch("shardplan.lower.input_conversion", _own_input_inside_blocks),
    "add a row-wise bias on every rank": lambda: patch.object(local, "_share", lambda factor, x: x),
    "count a whole stream's gradients tp times": lambda: patch.object(
        local, "_complete_when_whole", lambda stream, x: x
    ),
    "forget the mode before recomputation": lambda: patch("shardplan.apply.end", lambda stream, module, args, out: out),
    "ignore recompute": lambda: patch("shardplan.apply.recompute_forward", _nothing),
    "keep the cache of recomputed layers": lambda: patch.object(recompute, "_without_cache", _unchanged),
    "ignore the upper layers": lambda: patch("shardplan.api._listed", _only_the_first),
    "cast fp32 tables": lambda: patch("shardplan.apply.replace", lambda policy, **changes: policy),
    "leave positions to the model": lambda: patch.object(
        style, "full_positions", lambda stream, module, args, kwargs: (args, kwargs)
    ),
    "swap two sections": lambda: patch("shardplan.parallel.style.split_sections", _swap_the_last_two_sections),
    "forget all local sizes": lambda: patch("shardplan.parallel.style.localise", _nothing),
    "forget a mixer's groups": lambda: patch("shardplan.parallel.style.localise", _all_but_the_groups),
    "cut a convolution as one": lambda: patch.object(lower._Lowering, "_sections", _none_of_a_convolution),
    "add the bias behind a latent projection on every rank": lambda: patch.object(
        Style, "adds_bias_once", property(lambda self: self.split is Split.INPUT)
    ),
    "leave shared heads' gradients unsummed": lambda: patch(
        "shardplan.kv_heads.Collective", _gather_of_one_ranks_gradient
    ),
    "leave the head's gradient unsummed": lambda: patch.dict(collectives.OPERATIONS, multiply=_unchanged),
}


def compare(breakage: str, case: parity.Case, batches: list[parity.Batch]) -> list[str]:
    """The faults that the parity contract finds in a broken model."""
    with BREAKAGES[breakage]():
        return parity.compare(case, batches, afresh=True)


def compare_fused(breakage: str, case: parity.Case, batches: list[parity.Batch]) -> list[str]:
    """The same where mixers take their fused path."""
    with BREAKAGES[breakage]():
        return hybrid_jobs.fused(case, batches)[0]


def error_of(breakage: str, case: parity.Case) -> str:
    """What a forward raises, on every rank before it sends anything that others would wait for."""
    with BREAKAGES[breakage]():
        model = case.apply(tiny_models.build(case.model), build_mesh(case.mesh))
        try:
            model(**parity.make_inputs(parity.Batch())[0], use_cache=False)
        except RuntimeError as error:
            return str(error)
    return ""


def run(breakage: str, function: Callable[..., Any], *args: Any) -> Any:
    """Any job, on a broken library."""
    with BREAKAGES[breakage]():
        return function(*args)


def fsdp_units(breakage: str | None, case: parity.Case) -> list[str]:
    """The names of the modules that FSDP2 wraps."""
    model = tiny_models.build(case.model)
    mesh = build_mesh(case.mesh)
    if breakage:
        with BREAKAGES[breakage]():
            case.apply(model, mesh)
    else:
        case.apply(model, mesh)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def unsynced_modes(breakage: str | None, case: parity.Case) -> list[str]:
    """Two forwards of different lengths before either's backward, recomputed: gradients against one after the other."""
    mesh = build_mesh(case.mesh)

    def gradients(interleaved: bool) -> dict[str, Any]:
        model = tiny_models.build(case.model)
        case.apply(model, mesh)
        model.activation_checkpointing_enable()
        batches: Sequence[Any] = [parity.make_inputs(parity.Batch(length=length)) for length in (16, 5)]
        losses = []
        for inputs, targets in batches:
            losses.append(parity.cross_entropy(model(**inputs, use_cache=False).logits, targets))
            if not interleaved:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        assert getattr(model, APPLIED).stream is not None
        return {name: parity.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    def run() -> list[str]:
        expected, actual = gradients(False), gradients(True)
        return [name for name in expected if not (expected[name] - actual[name]).abs().max() <= 1e-6]

    if breakage is None:
        return run()
    with BREAKAGES[breakage]():
        return run()


def counts(breakage: str, case: parity.Case) -> dict[str, dict[str, int]]:
    """The collectives of a broken model."""
    with BREAKAGES[breakage]():
        return communication.collectives(case)
