"""A compiled plan for people and for programs: what each rule did, what stays whole, what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shardplan.checks.names import general
from shardplan.checks.target import count, size
from shardplan.compiled import CompiledParameter, CompiledPlan
from shardplan.plan import NULL, Rule
from shardplan.resolve import Match, ResolvedPlan


@dataclass(frozen=True, slots=True)
class RuleRow:
    """What one alternative of one rule did. Bytes are of distinct parameters: whole, and what one tp rank holds."""

    where: str
    layer: str
    pattern: str
    style: str
    matched: int
    placements: tuple[str, ...]
    nbytes: int
    rank_nbytes: int


@dataclass(frozen=True, slots=True)
class Collectives:
    """How often one step calls a collective over tp, at modules of one kind: ``model.layers.*.mlp``."""

    module: str
    direction: str
    name: str
    calls: int


@dataclass(frozen=True, slots=True)
class Report:
    plan: str
    model: str
    mesh: str
    sequence_parallel: bool
    rules: tuple[RuleRow, ...]
    replicated: tuple[tuple[str, int, int], ...]  # general name, parameters, bytes
    nbytes: int
    collectives: tuple[Collectives, ...]
    sums: int
    units: tuple[tuple[str, int], ...]  # general name, how many
    recompute: tuple[tuple[str, int], ...]


def make_report(resolved: ResolvedPlan, compiled: CompiledPlan) -> Report:
    """Summarise a compiled plan by rule, by parameter kind and by module kind."""
    parameters = {p.fqn: p for module in compiled.modules for p in module.parameters}
    whole = [p for p in compiled.parameters if not p.sharded]
    calls = Counter((general(m.fqn), direction, name) for m, direction, name in compiled.collectives())
    return Report(
        plan=compiled.name,
        model=compiled.model,
        mesh=str(compiled.mesh),
        sequence_parallel=compiled.sequence_parallel,
        rules=tuple(
            _rule_row(matched.line, match, resolved, parameters, compiled.mesh.tp)
            for matched in resolved.rules
            for match in matched.matches
        ),
        replicated=tuple(_grouped(whole)),
        nbytes=sum(p.nbytes for p in compiled.parameters),
        collectives=tuple(Collectives(*key, calls=number) for key, number in calls.items()),
        sums=len(compiled.coalesced_sums()),
        units=tuple(Counter(general(unit.fqn) for unit in compiled.units).items()),
        recompute=tuple(Counter(map(general, compiled.recompute)).items()),
    )


def _rule_row(
    rule: Rule, match: Match, resolved: ResolvedPlan, parameters: dict[str, CompiledParameter], tp: int
) -> RuleRow:
    claimed = {
        p.info.identity: parameters[p.info.fqn]
        for module in resolved.modules
        for p in module.parameters
        if p.claim is rule
        and any(p.info.fqn == fqn or p.info.fqn.startswith(f"{fqn}.") for fqn in _around(p.info.fqn, match))
    }
    return RuleRow(
        where=str(rule.where),
        layer=str(rule.layer),
        pattern=match.alternative.text,
        style=_spoken_style(rule),
        matched=len(match.fqns),
        placements=tuple(dict.fromkeys(f"{p.name} {p.placement}" for p in claimed.values())),
        nbytes=sum(p.nbytes for p in claimed.values()),
        rank_nbytes=sum(rank_nbytes(p, tp) for p in claimed.values()),
    )


def rank_nbytes(parameter: CompiledParameter, tp: int) -> int:
    """What the first, fullest rank of a tp group holds of a parameter, in bytes."""
    if not parameter.sharded:
        return parameter.nbytes
    length = parameter.shape[parameter.placement.dim or 0]
    return parameter.nbytes // length * -(-length // tp)


def _around(fqn: str, match: Match) -> Iterator[str]:
    names = set(match.fqns)
    return (name for name in _prefixes(fqn) if name in names)


def _prefixes(fqn: str) -> Iterator[str]:
    tokens = fqn.split(".")
    return (".".join(tokens[:end]) for end in range(len(tokens), -1, -1))


def _spoken_style(rule: Rule) -> str:
    edges = [f"{side}: {edge}" for side, edge in (("input", rule.input), ("output", rule.output)) if edge]
    name = "null (replicated on purpose)" if rule.style == NULL else rule.style
    return ", ".join(filter(None, (name, *edges)))


def _grouped(parameters: list[CompiledParameter]) -> Iterator[tuple[str, int, int]]:
    groups: dict[str, list[int]] = {}
    for parameter in parameters:
        groups.setdefault(general(parameter.fqn), []).append(parameter.nbytes)
    return ((name, len(sizes), sum(sizes)) for name, sizes in groups.items())


# ---------------------------------------------------------------- rendering


def as_dict(report: Report, compiled: CompiledPlan) -> dict[str, Any]:
    """The report and the compiled plan as JSON-able data, stable enough to compare."""
    parameters = [
        {"fqn": p.fqn, "shape": list(p.shape), "placement": str(p.placement), "gradient": p.gradient.value}
        for module in compiled.modules
        for p in module.parameters
    ]
    edges = [
        {"module": module.fqn, "side": side, "conversion": str(edge.conversion),
         "collective": _spoken(edge.in_mode(compiled.sequence_parallel))}
        for module in compiled.modules
        for side, edge in (("input", module.input), ("output", module.output))
        if edge is not None
    ]  # fmt: skip
    units = [{"fqn": unit.fqn, "reshard": unit.reshard} for unit in compiled.units]
    return {**asdict(report), "parameters": parameters, "edges": edges, "fsdp": units}


def _spoken(collective: Any) -> list[str] | None:
    return None if collective is None else [collective.forward, collective.backward]


def print_report(report: Report, console: Console) -> None:
    """Tables for people: rules, replicated parameters, collectives, units."""
    mode = "sequence parallel" if report.sequence_parallel else "tensor parallel"
    console.print(f"plan {report.plan} on {report.model}, mesh {report.mesh}, {mode}\n")
    console.print(_rules_table(report))
    whole = sum(nbytes for _, _, nbytes in report.replicated)
    share = 100 * whole / report.nbytes if report.nbytes else 0
    console.print(f"\nreplicated over tp: {size(whole)} of {size(report.nbytes)} ({share:.2f} %)")
    for name, number, nbytes in report.replicated:
        console.print(f"  {name}  {count(number, 'parameter')}, {size(nbytes)}")
    console.print("\ncollectives over tp in one step (FSDP2's own and the loss not counted)")
    for direction in ("forward", "backward"):
        calls = [entry for entry in report.collectives if entry.direction == direction]
        console.print(f"  {direction}: {sum(entry.calls for entry in calls)}")
        for entry in calls:
            console.print(f"    {entry.module}  {entry.name} x {entry.calls}")
    console.print(f"  coalesced sums of replicated parameters' gradients: {report.sums}")
    units = ", ".join(f"{name} x {number}" for name, number in report.units)
    console.print(f"\nFSDP2 units: {units + ', ' if units else ''}the model")
    if report.recompute:
        console.print("recomputed: " + ", ".join(f"{name} x {number}" for name, number in report.recompute))


def _rules_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("rule", "matches", "style", "placement", "whole", "per rank", "from"):
        table.add_column(
            heading, justify="right" if heading in ("matches", "whole", "per rank") else "left", overflow="fold"
        )
    for row in report.rules:
        sizes = (size(row.nbytes), size(row.rank_nbytes)) if row.nbytes else ("", "")
        table.add_row(
            row.pattern, str(row.matched), row.style, ", ".join(row.placements), *sizes, f"{row.where} {row.layer}"
        )
    return table
