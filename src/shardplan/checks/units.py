"""Checks of what FSDP2 wraps."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.names import general
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic
from shardplan.inventory import ancestors
from shardplan.plan import Unit
from shardplan.resolve import Matched


def check_units(target: Target) -> Iterator[Diagnostic]:
    """SP109: FSDP2 units are modules that run, and no unit separates tied parameters."""
    for matched in target.resolved.units:
        yield from _containers(target, matched)
    units = {fqn for matched in target.resolved.units for fqn in matched.fqns}
    for group in target.resolved.inventory.ties:
        around = {parameter.fqn: _unit_around(parameter.fqn, units) for parameter in group}
        if len(set(around.values())) > 1:
            places = [f"{fqn} in {unit or 'the outermost unit'}" for fqn, unit in around.items()]
            inner = [unit for unit in around.values() if unit]
            yield Diagnostic(
                "SP109",
                f"tied parameters lie in different FSDP2 units: {listed(places)}",
                where=next(m.line.where for m in target.resolved.units if inner[0] in m.fqns),
                subject=group[0].fqn,
                expected="one unit around all names of a parameter",
                hint=f"take {listed(inner)} out of fsdp.units; the outermost unit then holds both",
            )


def _unit_around(parameter: str, units: set[str]) -> str:
    return next((fqn for fqn in ancestors(parameter) if fqn in units), "")


def _containers(target: Target, matched: Matched[Unit]) -> Iterator[Diagnostic]:
    for fqn in matched.fqns:
        module = target.resolved.inventory.by_fqn[fqn]
        if module.container:
            yield Diagnostic(
                "SP109",
                f"FSDP2 cannot wrap {general(fqn)}, a {module.class_name}: its forward never runs",
                where=matched.line.where,
                subject=general(fqn),
                expected="modules that are called in the forward",
                hint=f"name its members: `{target.spell(fqn)}.*`",
            )
