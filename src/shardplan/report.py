"""What a compiled plan comes to, as data: what each rule did, what stays whole, what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from shardplan.checks.names import general
from shardplan.checks.target import Target
from shardplan.compiled import CompiledParameter, CompiledPlan
from shardplan.coverage import Coverage, coverage_of
from shardplan.degrees import Degrees, tp_degrees
from shardplan.inventory import ancestors
from shardplan.mesh import MeshSpec
from shardplan.resolved import ResolvedPlan


@dataclass(frozen=True, slots=True)
class Bytes:
    """Parameters in bytes: whole, and what the fullest rank holds once tp has cut them, and once FSDP2 has, too."""

    whole: int
    tp_rank: int
    rank: int

    @classmethod
    def of(cls, parameters: Iterable[CompiledParameter], mesh: MeshSpec) -> Bytes:
        sizes = [(p.nbytes, *_rank_nbytes(p, mesh)) for p in parameters]
        return cls(*map(sum, zip(*sizes, strict=True))) if sizes else cls(0, 0, 0)


@dataclass(frozen=True, slots=True)
class RuleRow:
    """What one alternative of one rule did; ``replicated`` counts parameters that it leaves whole over tp."""

    where: str
    layer: str
    pattern: str
    style: str
    matched: int
    placements: tuple[str, ...]
    parameters: int
    nbytes: Bytes
    replicated: int
    replicated_nbytes: int


@dataclass(frozen=True, slots=True)
class Collectives:
    """How often one step calls a collective over tp, at modules of one kind: ``model.layers.*.mlp``."""

    module: str
    direction: str
    name: str
    calls: int


@dataclass(frozen=True, slots=True)
class Report:
    """A compiled plan, summarised. Bytes are of distinct parameters; names stand for all layers."""

    plan: str
    model: str
    mesh: str
    sequence_parallel: bool
    rules: tuple[RuleRow, ...]
    parameters: int
    nbytes: Bytes
    replicated_nbytes: int
    coverage: Coverage
    degrees: Degrees
    ties: tuple[tuple[str, ...], ...]
    collectives: tuple[Collectives, ...]
    sums: int
    units: tuple[tuple[str, int], ...]  # general name, how many
    recompute: tuple[tuple[str, int], ...]


def make_report(target: Target, compiled: CompiledPlan) -> Report:
    """Summarise what ``target`` was compiled to, by rule and by kind of module."""
    resolved = target.resolved
    calls = Counter((general(m.fqn), direction, name) for m, direction, name in compiled.collectives())
    return Report(
        plan=compiled.name,
        model=compiled.model,
        mesh=str(compiled.mesh),
        sequence_parallel=compiled.sequence_parallel,
        rules=tuple(_rule_rows(resolved, compiled)),
        parameters=sum(prod(p.shape) for p in compiled.parameters),
        nbytes=Bytes.of(compiled.parameters, compiled.mesh),
        replicated_nbytes=sum(p.nbytes for p in compiled.parameters if not p.sharded),
        coverage=coverage_of(resolved, compiled),
        degrees=tp_degrees(target),
        ties=tuple(tuple(parameter.fqn for parameter in group) for group in resolved.inventory.ties),
        collectives=tuple(Collectives(*key, calls=number) for key, number in calls.items()),
        sums=len(compiled.coalesced_sums()),
        units=tuple(Counter(general(unit.fqn) for unit in compiled.units).items()),
        recompute=tuple(Counter(map(general, compiled.recompute)).items()),
    )


def _rule_rows(resolved: ResolvedPlan, compiled: CompiledPlan) -> Iterator[RuleRow]:
    claimed: dict[int, dict[str, CompiledParameter]] = {}
    by_fqn = {p.fqn: p for module in compiled.modules for p in module.parameters}
    for module in resolved.modules:
        for parameter in module.parameters:
            claimed.setdefault(id(parameter.claim), {})[parameter.info.fqn] = by_fqn[parameter.info.fqn]
    for matched in resolved.rules:
        of_rule = claimed.get(id(matched.line), {})
        for match in matched.matches:
            names = set(match.fqns)
            own = {p.identity: p for fqn, p in of_rule.items() if not names.isdisjoint((fqn, *ancestors(fqn)))}
            whole = [p for p in own.values() if not p.sharded]
            yield RuleRow(
                where=str(matched.line.where),
                layer=str(matched.line.layer),
                pattern=match.alternative.text,
                style=matched.line.spoken,
                matched=len(match.fqns),
                placements=tuple(dict.fromkeys(_placed(p) for p in own.values())),
                parameters=len(own),
                nbytes=Bytes.of(own.values(), compiled.mesh),
                replicated=len(whole),
                replicated_nbytes=sum(p.nbytes for p in whole),
            )


def _placed(parameter: CompiledParameter) -> str:
    sections = f" in {len(parameter.sections)} sections" if parameter.sections else ""
    return f"{parameter.name} {parameter.placement}{sections}"


def _rank_nbytes(parameter: CompiledParameter, mesh: MeshSpec) -> tuple[int, int]:
    """What the first, fullest rank holds: of tp alone, and of the whole mesh. FSDP2 cuts dim 0, rounding up."""
    shape = list(parameter.shape)
    element = parameter.nbytes // prod(shape) if prod(shape) else 0
    if parameter.sharded:
        dim = parameter.placement.dim or 0
        lengths = [section.length for section in parameter.sections] or [shape[dim]]
        shape[dim] = sum(-(-length // mesh.tp) for length in lengths)
    over_tp = element * prod(shape)
    if shape:
        shape[0] = -(-shape[0] // prod(size for name, size in mesh.axes if name in mesh.shard_axes))
    return over_tp, element * prod(shape)


def as_dict(report: Report, compiled: CompiledPlan) -> dict[str, Any]:
    """The report with every name of the compiled plan as JSON-able data; its schema is that of `FullReport`."""
    return {**asdict(report), "compiled": asdict(_in_full(compiled))}


@dataclass(frozen=True, slots=True)
class ParameterName:
    """One parameter under one of its names."""

    fqn: str
    shape: tuple[int, ...]
    placement: str
    gradient: str


@dataclass(frozen=True, slots=True)
class Directions:
    """What an edge runs in the forward, and in the backward."""

    forward: str
    backward: str


@dataclass(frozen=True, slots=True)
class ModuleEdge:
    """An edge in the plan's mode; ``side`` is input or output."""

    module: str
    side: str
    conversion: str
    collective: Directions | None


@dataclass(frozen=True, slots=True)
class UnitName:
    """A module that FSDP2 wraps; ``reshard`` None leaves FSDP2's default."""

    fqn: str
    reshard: bool | int | None


@dataclass(frozen=True, slots=True)
class InFull:
    """A compiled plan name by name."""

    parameters: tuple[ParameterName, ...]
    edges: tuple[ModuleEdge, ...]
    fsdp: tuple[UnitName, ...]


@dataclass(frozen=True, slots=True)
class FullReport(Report):
    """What ``--format json`` prints of a plan."""

    compiled: InFull


def _in_full(compiled: CompiledPlan) -> InFull:
    return InFull(
        parameters=tuple(
            ParameterName(p.fqn, p.shape, str(p.placement), p.gradient.value)
            for module in compiled.modules
            for p in module.parameters
        ),
        edges=tuple(_edges(compiled)),
        fsdp=tuple(UnitName(unit.fqn, unit.reshard) for unit in compiled.units),
    )


def _edges(compiled: CompiledPlan) -> Iterator[ModuleEdge]:
    for module in compiled.modules:
        for side, edge in (("input", module.input), ("output", module.output)):
            if edge is not None:
                runs = edge.in_mode(compiled.sequence_parallel)
                directions = Directions(runs.forward, runs.backward) if runs else None
                yield ModuleEdge(module.fqn, side, str(edge.conversion), directions)
