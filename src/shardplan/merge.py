"""Layers of plans as one: who lies below whom, and which of them a merged plan listens to on each question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from shardplan.diagnostics import Diagnostic, Location, PlanError
from shardplan.from_python import plan_from_dict
from shardplan.load import find_plan, load_plan
from shardplan.plan import Layer, MixedPrecision, Plan, Recompute, Reference, Rule, Unit
from shardplan.resources import shipped_plans

T = TypeVar("T")
Ranked = TypeVar("Ranked", Rule, Unit, Recompute)
PlanSource = str | Path | Plan | Mapping[str, Any]

AUTO = "auto"
HF = "hf"  # transformers' own plan


def read_plan(plan: PlanSource | Sequence[PlanSource], architectures: Sequence[str] = ()) -> Plan:
    """Load a plan, or layers of which later ones win, with everything that they extend, and merge them.

    Args:
        plan: paths, shipped names, plans, dicts of patterns to styles; ``"auto"`` is the shipped plan for the model,
            or where none is shipped transformers' own.
        architectures: the model's class names, for ``"auto"``.

    Raises:
        PlanError: a file cannot be read or is not a plan.
    """
    sources = [plan] if isinstance(plan, str | Path | Plan | Mapping) else list(plan)
    return merge([layer for source in sources for layer in _layers(source, architectures)])


def _layers(source: PlanSource, architectures: Sequence[str]) -> tuple[Plan, ...]:
    if isinstance(source, Mapping):
        return (plan_from_dict(source),)
    return resolve_layers(_shipped_for(architectures) if source == AUTO else load_plan(source))


def _shipped_for(architectures: Sequence[str]) -> Plan:
    """The shipped plan for the nearest of the model's classes; where there is none, transformers' own."""
    plans = [load_plan(path) for path in shipped_plans().values()]
    for architecture in architectures:
        for plan in plans:
            if architecture in plan.architectures:
                return plan
    return Plan(AUTO, Location(AUTO), over_hf=True)


def resolve_layers(plan: Plan) -> tuple[Plan, ...]:
    """The plan and those that it extends, lowest first.

    Raises:
        PlanError: SP011, a layer that is not there or that goes round in a circle; or what is wrong in its file.
    """
    layers, seen = [plan], [_identity(plan)]
    while (upper := layers[-1]).extends not in (None, HF):
        path = _extended(upper)
        if path.resolve() in seen:
            chain_of_names = " -> ".join((*(layer.name for layer in layers), path.stem))
            raise _no_layer(upper, f"the layers go round in a circle: {chain_of_names}", hint="remove one 'extends'")
        layers.append(load_plan(path))
        seen.append(path.resolve())
    return tuple(reversed(layers))


def merge(layers: Sequence[Plan]) -> Plan:
    """One plan that says what its layers say; on each question the highest layer that speaks is heard.

    Rules, units and recompute patterns are all kept, each with the rank of its layer: which rule wins is decided for
    each module. An already merged plan keeps the order of its own layers.

    Args:
        layers: lowest first, at least one.
    """
    assert layers, "nothing to merge"
    ranked = tuple(_ranked(layers))
    top = ranked[-1]
    recompute = [plan.recompute for plan in ranked if plan.recompute is not None]
    return replace(
        top,
        rank=top.rank,
        architectures=_highest(plan.architectures or None for plan in ranked) or (),
        roots=_highest(plan.roots or None for plan in ranked) or (),
        rules=tuple(chain.from_iterable(plan.rules for plan in ranked)),
        units=tuple(chain.from_iterable(plan.units for plan in ranked)),
        root_reshard=_highest(plan.root_reshard for plan in ranked),
        recompute=tuple(chain.from_iterable(recompute)) if recompute else None,
        sequence_parallel=_highest(plan.sequence_parallel for plan in ranked),
        logits=_highest(plan.logits for plan in ranked),
        mixed_precision=_mixed_precision(ranked),
        cpu_offload=_highest(plan.cpu_offload for plan in ranked),
        reference=Reference(
            _highest(plan.reference.models or None for plan in ranked) or (),
            _highest(plan.reference.meshes or None for plan in ranked) or (),
            _highest(plan.reference.places or None for plan in ranked) or (),
        ),
        extends=None,
        extends_where=_highest(plan.extends_where for plan in ranked),
        fallback=_highest(plan.fallback for plan in ranked),
        omits_silently=all(plan.omits_silently for plan in ranked),
        over_hf=any(plan.over_hf for plan in ranked),
    )


def _identity(plan: Plan) -> Path:
    return Path(plan.where.file).resolve()


def _extended(plan: Plan) -> Path:
    """The file that ``extends`` means."""
    assert plan.extends is not None
    try:
        path = find_plan(plan.extends, beside=Path(plan.where.file).parent)
    except PlanError as error:
        (missing,) = error.diagnostics
        raise _no_layer(plan, missing.message, missing.expected, missing.hint) from None
    if not path.is_file():
        raise _no_layer(
            plan, f"the plan below, '{path}', is not there", "a shipped name, or a path from this file's folder"
        )
    return path


def _no_layer(plan: Plan, message: str, expected: str = "", hint: str = "") -> PlanError:
    where = plan.extends_where or plan.where
    return PlanError([Diagnostic("SP011", message, where, str(plan.extends), expected, hint)])


def _ranked(layers: Sequence[Plan]) -> Iterator[Plan]:
    """The plans with ranks that rise from the first to the last."""
    lowest = 0
    for plan in layers:
        parts: tuple[Rule | Unit | Recompute, ...] = (*plan.rules, *plan.units, *(plan.recompute or ()))
        own = sorted({part.layer.rank for part in parts} | {plan.rank})
        ranks = {rank: lowest + offset for offset, rank in enumerate(own)}
        yield replace(
            plan,
            rank=ranks[plan.rank],
            rules=_with_ranks(plan.rules, ranks),
            units=_with_ranks(plan.units, ranks),
            recompute=None if plan.recompute is None else _with_ranks(plan.recompute, ranks),
        )
        lowest += len(ranks)


def _with_ranks(parts: Iterable[Ranked], ranks: dict[int, int]) -> tuple[Ranked, ...]:
    def ranked(layer: Layer) -> Layer:
        return replace(layer, rank=ranks[layer.rank])

    return tuple(replace(part, layer=ranked(part.layer)) for part in parts)


def _highest(answers: Iterable[T | None]) -> T | None:
    """The last answer that is one."""
    return next((answer for answer in reversed(list(answers)) if answer is not None), None)


def _mixed_precision(layers: Sequence[Plan]) -> MixedPrecision | None:
    """Each dtype from the highest layer that names it."""
    stated = [plan.mixed_precision for plan in layers if plan.mixed_precision is not None]
    if not stated:
        return None
    answers: dict[str, Any] = {f.name: _highest(getattr(s, f.name) for s in stated) for f in fields(MixedPrecision)}
    return MixedPrecision(**answers)
