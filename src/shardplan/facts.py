"""A compiled plan as facts by name, without the places in files that they come from: what is compared and locked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

from shardplan.checks.names import general
from shardplan.compiled import CompiledModule, CompiledParameter, CompiledPlan
from shardplan.edges import Collective
from shardplan.ranged import ranged, spelled_out
from shardplan.report import Bytes

Value = str | int | bool | None
Values = tuple[tuple[str, Value], ...]  # what is said of a name, in a fixed order

THE_MODEL = "(the model)"


@dataclass(frozen=True, slots=True)
class Fact:
    """What holds of one thing: ``parameters``, ``model.norm.weight``, its shape, placement and so on."""

    section: str
    name: str
    values: Values


@dataclass(frozen=True, slots=True)
class Row:
    """Facts that are alike, under one name with ranges."""

    section: str
    names: str
    count: int
    values: Values


def structure(compiled: CompiledPlan) -> tuple[Fact, ...]:
    """What a plan makes of a model on any mesh and in both modes."""
    return (*_parameters(compiled), *_edges(compiled), *_modules(compiled), *_units(compiled), *_options(compiled))


def in_situation(compiled: CompiledPlan) -> tuple[Fact, ...]:
    """What it comes to on its mesh and in its mode."""
    whole = (*_parameters_here(compiled), *_edges_here(compiled), *_modules(compiled), *_units(compiled))
    return (Fact("totals", THE_MODEL, totals(compiled)), *whole, *_options(compiled))


def totals(compiled: CompiledPlan) -> Values:
    """Calls over tp in one step, and bytes of parameters on the fullest rank."""
    calls = [direction for _, direction, _ in compiled.collectives()]
    nbytes = Bytes.of(compiled.parameters, compiled.mesh)
    return (
        ("collectives_forward", calls.count("forward")),
        ("collectives_backward", calls.count("backward")),
        ("gradient_sums", len(compiled.coalesced_sums())),
        ("nbytes_per_tp_rank", nbytes.tp_rank),
        ("nbytes_per_rank", nbytes.rank),
    )


def rows(facts: Iterable[Fact]) -> tuple[Row, ...]:
    """Facts in their order, those that say the same of all layers as one."""
    alike: dict[tuple[str, str, Values], list[str]] = {}
    for fact in facts:
        alike.setdefault((fact.section, general(fact.name), fact.values), []).append(fact.name)
    return tuple(
        Row(section, short, count, values)
        for (section, _, values), names in alike.items()
        for short, count in ranged(names).items()
    )


def facts_of(section: str, names: str, values: Values) -> Iterator[Fact]:
    """The facts behind a row; the inverse of `rows`."""
    return (Fact(section, name, values) for name in spelled_out(names))


def _parameters(compiled: CompiledPlan) -> Iterator[Fact]:
    first: dict[int, str] = {}
    for module in compiled.modules:
        for p in module.parameters:
            tied = first.setdefault(p.identity, p.fqn)
            values: Values = (
                ("shape", " x ".join(map(str, p.shape))),
                ("placement", str(p.placement)),
                ("gradient", p.gradient.value),
                *_sections(p),
            )
            yield Fact("parameters", p.fqn, values if tied == p.fqn else (*values, ("tied_to", tied)))


def _sections(parameter: CompiledParameter) -> Iterator[tuple[str, Value]]:
    if parameter.sections:
        yield "sections", ", ".join(f"{section.name} {section.length}" for section in parameter.sections)


def _parameters_here(compiled: CompiledPlan) -> Iterator[Fact]:
    summed = {p.fqn for _, p in compiled.summed_parameters()}
    for module in compiled.modules:
        for p in module.parameters:
            nbytes = Bytes.of([p], compiled.mesh)
            yield Fact(
                "parameters",
                p.fqn,
                (
                    ("placement", str(p.placement)),
                    ("gradient", p.gradient.value),
                    ("gradient_summed", p.fqn in summed),
                    ("nbytes_per_tp_rank", nbytes.tp_rank),
                    ("nbytes_per_rank", nbytes.rank),
                ),
            )


def _edges(compiled: CompiledPlan) -> Iterator[Fact]:
    for module in compiled.modules:
        for section, edge in (("inputs", module.input), ("outputs", module.output)):
            if edge is not None:
                modes = ("tensor_parallel", _spoken(edge.whole)), ("sequence_parallel", _spoken(edge.cut))
                yield Fact(section, module.fqn, (("conversion", str(edge.conversion)), *modes))


def _edges_here(compiled: CompiledPlan) -> Iterator[Fact]:
    for module in compiled.modules if compiled.mesh.has_tp else ():
        for section, edge in (("inputs", module.input), ("outputs", module.output)):
            if edge is not None:
                runs = _spoken(edge.in_mode(compiled.sequence_parallel))
                yield Fact(section, module.fqn, (("conversion", str(edge.conversion)), ("runs", runs)))


def _spoken(collective: Collective | None) -> str:
    """``all_gather / reduce_scatter``: forward and backward."""
    return "nothing" if collective is None else f"{collective.forward} / {collective.backward}"


def _modules(compiled: CompiledPlan) -> Iterator[Fact]:
    """What else is done to modules."""
    for module in compiled.modules:
        if values := tuple(_treatment(module)):
            yield Fact("modules", module.fqn, values)


def _treatment(module: CompiledModule) -> Iterator[tuple[str, Value]]:
    if module.splits_vocabulary:
        yield "splits_vocabulary", True
    if module.positions:
        yield "given_positions", True
    for size in module.local_sizes:
        yield f"local_{'config.' if size.of_config else ''}{size.name}", size.total
    if module.native is not None:
        yield "applied_as_it_stands", type(module.native).__name__


def _units(compiled: CompiledPlan) -> Iterator[Fact]:
    """FSDP2 units and recomputed modules."""
    for unit in compiled.units:
        yield Fact("fsdp_units", unit.fqn, (("reshard", unit.reshard),))
    yield Fact("fsdp_units", THE_MODEL, (("reshard", compiled.root_reshard),))
    for fqn in compiled.recompute:
        yield Fact("recomputed", fqn, (("recomputed", True),))


def _options(compiled: CompiledPlan) -> Iterator[Fact]:
    """What holds of the model as a whole."""
    stream = (
        ("runs_in", compiled.decoder),
        ("ends_at", compiled.gather),
        ("cut_by_embedding", compiled.cut_by_embedding),
    )
    yield Fact("options", "residual_stream", stream)
    if compiled.head is not None:
        yield Fact("options", "logits", tuple(_pairs(compiled.head)))
    if compiled.mixed_precision is not None:
        yield Fact("options", "mixed_precision", tuple(_pairs(compiled.mixed_precision)))
    yield Fact("options", "cpu_offload", (("on", compiled.cpu_offload),))


def _pairs(of: Any) -> Iterator[tuple[str, Value]]:
    return zip((field.name for field in fields(of)), astuple(of), strict=True)
