"""Checks of what FSDP2 wraps."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardplan.checks.names import general, with_article
from shardplan.checks.target import Target, listed, size
from shardplan.diagnostics import Diagnostic, Location, Severity
from shardplan.inventory import ancestors
from shardplan.plan import Recompute, Unit
from shardplan.resolved import Matched


def check_units(target: Target) -> Iterator[Diagnostic]:
    """SP109: FSDP2 units are modules that run, and no unit separates tied parameters."""
    for matched in target.resolved.units:
        yield from _containers(target, matched, "FSDP2 cannot wrap")
        yield from _reshard(target, matched.line.reshard, matched.line.where, matched.line.pattern.text)
    yield from _reshard(target, target.resolved.plan.root_reshard, target.resolved.plan.where, "root")
    yield from _whole_model(target)
    yield from _root_reshards(target)
    for entry in target.resolved.recompute:
        yield from _containers(target, entry, "nothing can be recomputed at")
    units = {fqn for matched in target.resolved.units for fqn in matched.fqns}
    yield from _layers_without_unit(target, units)
    for group in target.resolved.inventory.ties if target.mesh.has_dp else ():
        around = {parameter.fqn: _unit_around(parameter.fqn, units) for parameter in group}
        if len(set(around.values())) > 1:
            places = [f"{fqn} in {unit or 'the outermost unit'}" for fqn, unit in around.items()]
            inner = [unit for unit in around.values() if unit]
            around_one = [m.line for m in target.resolved.units if not set(inner).isdisjoint(m.fqns)]
            yield Diagnostic(
                "SP109",
                f"tied parameters lie in different FSDP2 units: {listed(places)}",
                where=max(around_one, key=lambda unit: unit.layer.rank).where,
                subject=group[0].fqn,
                expected="one unit around all names of a parameter",
                hint=f"take {listed(inner)} out of fsdp.units; the outermost unit then holds both",
            )


def _layers_without_unit(target: Target, units: set[str]) -> Iterator[Diagnostic]:
    """SP111: decoder layers that no unit of their own holds are gathered all at once."""
    layers = target.stream.layers
    if layers is None or not target.mesh.has_dp or any(target.explained(fqn) for fqn in units):
        return
    modules = target.resolved.inventory.modules
    members = [m.fqn for m in modules if m.fqn and next(ancestors(m.fqn)) == layers]
    yield from _around_layers(target)
    bare = [member for member in members if not any(unit == member or unit.startswith(f"{member}.") for unit in units)]
    if len(bare) > 1:
        held = tuple(f"{member}." for member in bare)
        nbytes = sum(p.nbytes for m in modules for p in m.parameters if p.fqn.startswith(held))
        yield Diagnostic(
            "SP111",
            f"{len(bare)} of {len(members)} decoder layers lie in no FSDP2 unit of their own: their parameters, "
            f"{size(nbytes)} over all tp ranks, are gathered at once",
            where=target.resolved.plan.where,
            subject=layers,
            expected="one unit for each layer",
            hint=f'write `fsdp: {{units: {{"{target.spell(layers)}.*": {{}}}}}}`',
            severity=Severity.WARNING,
        )


def _around_layers(target: Target) -> Iterator[Diagnostic]:
    """SP111: a unit around all layers frees what it holds itself when they are done, just before it is needed again."""
    by_fqn = target.resolved.inventory.by_fqn
    for matched in target.resolved.units:
        for fqn in set(matched.fqns).intersection(ancestors(target.stream.layers or "")) - {""}:
            if matched.line.reshard is False:
                continue
            yield Diagnostic(
                "SP111",
                f"FSDP2 unit {fqn}, {with_article(by_fqn[fqn].class_name)}, lies around the decoder layers: "
                "what it holds itself is freed after the forward and gathered again at once",
                where=matched.line.where,
                subject=fqn,
                expected="units inside the layers, or `reshard: false`",
                hint="remove it: the outermost unit holds the rest",
                severity=Severity.WARNING,
            )


def _root_reshards(target: Target) -> Iterator[Diagnostic]:
    """SP111: the outermost unit's parameters are needed last in the forward and first in the backward."""
    if target.resolved.plan.root_reshard and target.mesh.has_dp:
        yield Diagnostic(
            "SP111",
            "the outermost FSDP2 unit frees its parameters after the forward and gathers them again at once",
            where=target.resolved.plan.where,
            subject="root",
            expected="`root: {reshard: false}`",
            hint="write so, or leave it out",
            severity=Severity.WARNING,
        )


def _unit_around(parameter: str, units: set[str]) -> str:
    return next((fqn for fqn in ancestors(parameter) if fqn in units), "")


def _reshard(target: Target, reshard: bool | int | None, where: Location, subject: str) -> Iterator[Diagnostic]:
    """A number reshards over that many ranks, which must divide those that FSDP2 shards over."""
    ranks = prod(size for name, size in target.mesh.axes if name in target.mesh.shard_axes)
    if type(reshard) is int and target.mesh.has_dp and ranks % reshard:
        degrees = [str(n) for n in range(2, ranks + 1) if ranks % n == 0]
        yield Diagnostic(
            "SP109",
            f"reshard: {reshard} for {subject} does not divide the {ranks} ranks that FSDP2 shards over",
            where=where,
            subject=subject,
            expected=f"true, false{', or one of ' + ', '.join(degrees) if degrees else ''}",
            hint="true frees the parameters after the forward, false keeps them",
        )


def _whole_model(target: Target) -> Iterator[Diagnostic]:
    for matched in target.resolved.units:
        if "" in matched.fqns:
            yield Diagnostic(
                "SP109",
                f"{matched.line.pattern.text} is the model itself, which is always the outermost unit",
                where=matched.line.where,
                subject=matched.line.pattern.text,
                expected="units inside the model",
                hint="remove it; its options go under `fsdp: {root: {...}}`",
            )


def _containers(target: Target, matched: Matched[Unit] | Matched[Recompute], cannot: str) -> Iterator[Diagnostic]:
    for fqn in matched.fqns:
        module = target.resolved.inventory.by_fqn[fqn]
        if module.container:
            yield Diagnostic(
                "SP109",
                f"{cannot} {general(fqn)}, {with_article(module.class_name)}: its forward never runs",
                where=matched.line.where,
                subject=general(fqn),
                expected="modules that are called in the forward",
                hint=f"name its members: `{target.spell(fqn)}.*`",
            )
