"""Everything that a plan says of one module or parameter, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardplan.checks.names import general
from shardplan.checks.target import Target
from shardplan.compiled import CompiledModule, CompiledParameter, CompiledPlan
from shardplan.edges import Collective, Edge
from shardplan.inventory import ancestors
from shardplan.patterns import parse_pattern
from shardplan.precedence import why
from shardplan.ranged import ranged
from shardplan.resolved import Candidate, ResolvedParameter


@dataclass(frozen=True, slots=True)
class Spoken:
    """A rule that spoke. ``direct`` is False where it reaches down from above; ``why`` is empty for the winner."""

    pattern: str
    says: str
    where: str
    layer: str
    direct: bool
    wins: bool
    why: str


@dataclass(frozen=True, slots=True)
class Direction:
    """An edge in one mode: what runs in the forward, and in the backward."""

    forward: str
    backward: str


@dataclass(frozen=True, slots=True)
class ExplainedEdge:
    """``input`` or ``output``; None where a mode does nothing."""

    side: str
    conversion: str
    tensor_parallel: Direction | None
    sequence_parallel: Direction | None


@dataclass(frozen=True, slots=True)
class ExplainedParameter:
    """Where a parameter lies; ``rule`` decided, and is "" where none does. ``gradient`` is a replicated one's.

    ``placement``: ``replicate``, ``shard(0)``, or ``shard(0) in sections q, k, v`` of a packed parameter.
    """

    name: str
    shape: tuple[int, ...]
    placement: str
    gradient: str
    rule: str
    tied_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Names that fare alike, ``model.layers.[0-31].mlp``; other names within stand for all layers.

    Attributes:
        names, count: which names, and how many.
        kind: ``module`` or ``parameter``.
        module: the module's class; of a parameter, the module that owns it.
        rules: every rule that spoke, in order of precedence.
        block: the block whose edges serve it.
        edges, parameters, unit: None where the plan is refused, and nothing comes of it.
        unit: the FSDP2 unit, "" for the model; None without a dp axis, too.
        recomputed: the recomputed module that it is or lies in.
    """

    names: str
    count: int
    kind: str
    module: str
    rules: tuple[Spoken, ...]
    block: str | None
    edges: tuple[ExplainedEdge, ...] | None
    parameters: tuple[ExplainedParameter, ...] | None
    unit: str | None
    recomputed: str | None


@dataclass(frozen=True, slots=True)
class ExplainedName(Explanation):
    """An explanation with the plan and the situation that it is about: what ``--format json`` prints."""

    plan: str
    on: str


def explain(target: Target, compiled: CompiledPlan | None, name: str) -> tuple[Explanation, ...]:
    """Explain what ``name``, an fqn or a pattern, means in the model; nothing where it means nothing.

    Args:
        target: the plan on a model and a mesh.
        compiled: what it was compiled to; None where it was refused.
        name: of modules or parameters.

    Raises:
        ValueError: it is neither a name nor a pattern.
    """
    explainer = _Explainer(target, compiled)
    alike: dict[Explanation, list[str]] = {}
    for fqn in _meant(target, name):
        alike.setdefault(explainer.explain(fqn), []).append(fqn)
    return tuple(
        replace(explanation, names=names, count=count)
        for explanation, fqns in alike.items()
        for names, count in ranged(fqns).items()
    )


def known_names(target: Target) -> Iterator[str]:
    """Every name that can be explained: modules, then parameters."""
    yield from (module.fqn for module in target.resolved.modules)
    yield from (parameter.fqn for parameter in target.resolved.inventory.parameters)


def _meant(target: Target, name: str) -> list[str]:
    if name in set(known_names(target)):
        return [name]
    alternatives = parse_pattern(name).alternatives
    root = target.resolved.root
    rooted = [a.rooted(root or "") if a.relative else a for a in alternatives if root is not None or not a.relative]
    by_fqn = target.resolved.inventory.by_fqn
    found = ((fqn, by_fqn[fqn if fqn in by_fqn else next(ancestors(fqn))].class_name) for fqn in known_names(target))
    return [fqn for fqn, class_name in found if any(a.matches(fqn, class_name) for a in rooted)]


class _Explainer:
    """Explains name by name, in words that are the same for every layer."""

    def __init__(self, target: Target, compiled: CompiledPlan | None) -> None:
        self._modules = target.resolved.by_fqn
        self._ties = {p.fqn: group for group in target.resolved.inventory.ties for p in group}
        self._compiled = compiled
        self._parameters: Mapping[str, tuple[CompiledModule, CompiledParameter]] = {
            p.fqn: (module, p) for module in (compiled.modules if compiled else ()) for p in module.parameters
        }

    def explain(self, fqn: str) -> Explanation:
        module = self._modules.get(fqn)
        owner = self._modules[next(ancestors(fqn))] if module is None else module
        parameter = None if module else next(p for p in owner.parameters if p.info.fqn == fqn)
        parameters = owner.parameters if parameter is None else (parameter,)
        compiled = self._compiled
        return Explanation(
            names="",
            count=0,
            kind="module" if module else "parameter",
            module=owner.info.class_name if module else f"{general(owner.fqn)}, {owner.info.class_name}",
            rules=tuple(_spoken(owner.speakers, None) if parameter is None else _of_parameter(parameter)),
            block=None if owner.block is None else general(owner.block),
            edges=None if compiled is None or parameter else tuple(_edges(compiled.by_fqn[fqn])),
            parameters=None if compiled is None else tuple(map(self._parameter, parameters)),
            unit=None if compiled is None or not compiled.mesh.has_dp else general(_unit(compiled, fqn)),
            recomputed=None if compiled is None else _recomputed(compiled, fqn),
        )

    def _parameter(self, parameter: ResolvedParameter) -> ExplainedParameter:
        _, compiled = self._parameters[parameter.info.fqn]
        claim = next((c for c in parameter.speakers if c.rule is parameter.claim), None)
        ties = (other.fqn for other in self._ties.get(compiled.fqn, ()) if other.fqn != compiled.fqn)
        return ExplainedParameter(
            name=compiled.name,
            shape=compiled.shape,
            placement=_placement(compiled),
            gradient=compiled.gradient.value,
            rule=f"{claim.alternative.text} ({claim.rule.where})" if claim else "",
            tied_to=tuple(map(general, ties)),
        )


def _placement(parameter: CompiledParameter) -> str:
    """``shard(0)``; of a packed parameter with the names of its sections, each of which is cut on its own."""
    sections = ", ".join(section.name for section in parameter.sections)
    return f"{parameter.placement} in sections {sections}" if sections else str(parameter.placement)


def _of_parameter(parameter: ResolvedParameter) -> Iterator[Spoken]:
    """Rules of a block or of edges speak of the module, and decide nothing about its parameters."""
    claims = [c for c in parameter.speakers if c.style is None or c.style.claims]
    others = [c for c in parameter.speakers if c not in claims]
    yield from _spoken(claims, None)
    yield from _spoken(others, "decides about edges only")


def _spoken(ranked: Iterable[Candidate], reason: str | None) -> Iterator[Spoken]:
    once: dict[tuple[int, str], Candidate] = {}  # a rule of `**` speaks directly, and again from each module above
    for candidate in ranked:
        once.setdefault((id(candidate.rule), candidate.alternative.text), candidate)
    winner: Candidate | None = None
    for candidate in once.values():
        wins = winner is None and reason is None
        winner = winner or candidate
        yield Spoken(
            pattern=candidate.alternative.text,
            says=candidate.rule.spoken,
            where=str(candidate.rule.where),
            layer=str(candidate.rule.layer),
            direct=candidate.direct,
            wins=wins,
            why="" if wins else reason or why(winner, candidate),
        )


def _edges(module: CompiledModule) -> Iterator[ExplainedEdge]:
    for side, edge in (("input", module.input), ("output", module.output)):
        if edge is not None:
            yield _edge(side, edge)


def _edge(side: str, edge: Edge) -> ExplainedEdge:
    return ExplainedEdge(side, str(edge.conversion), _direction(edge.whole), _direction(edge.cut))


def _direction(collective: Collective | None) -> Direction | None:
    return None if collective is None else Direction(collective.forward, collective.backward)


def _unit(compiled: CompiledPlan, fqn: str) -> str:
    return fqn if any(unit.fqn == fqn for unit in compiled.units) else compiled.unit_around(fqn)


def _recomputed(compiled: CompiledPlan, fqn: str) -> str | None:
    return next((general(name) for name in (fqn, *ancestors(fqn)) if name in compiled.recompute), None)
