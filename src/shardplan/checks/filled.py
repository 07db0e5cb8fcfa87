"""Checks of what transformers' own plan fills where a plan says nothing: it is said, and whole groups at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardplan.checks.groups import Group
from shardplan.checks.names import general
from shardplan.checks.target import Target, count, few, listed, size
from shardplan.checks.transformers import of_hf
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.inventory import ParameterInfo
from shardplan.resolved import ResolvedModule, ResolvedParameter
from shardplan.styles import Split


def check_filled(target: Target) -> Iterator[Diagnostic]:
    """SP203, SP104: what transformers' plan fills is said, and it completes nothing that is written in part."""
    if not target.resolved.plan.filled:
        return
    for group in target.groups:
        yield from _completed(target, group.name, general(group.owner.fqn), _by_member(group))
    for module in target.resolved.modules:
        if module.info.experts is not None:
            claims = {parameter.info.name: [parameter] for parameter in module.parameters}
            yield from _completed(target, general(module.fqn), general(module.fqn), claims)
    yield from (_said(target, what, names) for what, names in _fills(target) if names)


def _fills(target: Target) -> Iterator[tuple[str, list[str]]]:
    """What transformers' plan decides about where no rule speaks, in words, with general names or patterns."""
    infos: dict[int, ParameterInfo] = {}
    for parameter in of_hf(target):
        infos.setdefault(parameter.info.identity, parameter.info)
    nbytes = sum(info.nbytes for info in infos.values())
    names = (general(info.fqn.rpartition(".")[0]) for info in infos.values())
    yield f"{count(len(infos), 'parameter')} ({size(nbytes)})", list(dict.fromkeys(names))
    rules = (module.rule for module in target.resolved.modules if not module.parameters)
    edges = (str(rule.pattern) for rule in rules if rule is not None and rule.of_hf)
    yield "the edges of modules", list(dict.fromkeys(edges))
    units = (unit.line for unit in target.resolved.units if unit.fqns)
    yield "FSDP2 units", [str(unit.pattern) for unit in units if unit.layer.kind == "hf"]


def _said(target: Target, what: str, names: list[str]) -> Diagnostic:
    return Diagnostic(
        "SP104",
        f"transformers' own plan decides about {what} of which no rule speaks: {few(names)}",
        where=target.resolved.plan.where,
        subject=names[0],
        expected="",
        hint="`plan-compile` prints what it says of them as [hf]; `fallback: none` leaves them alone",
        severity=Severity.NOTE,
    )


def _by_member(group: Group) -> dict[str, list[ResolvedParameter]]:
    """The parameters of linears that are cut, or that transformers' plan would cut: routers stay whole in any case."""
    due = [member for member in group.members if member.role != "whole" or _hf_cuts(member.module)]
    return {member.name: list(member.module.parameters) for member in due}


def _hf_cuts(module: ResolvedModule) -> bool:
    styles = (candidate.style for candidate in module.speakers if candidate.rule.of_hf)
    return any(style is not None and style.split is not Split.NONE for style in styles)


def _completed(
    target: Target, owner: str, subject: str, parts: Mapping[str, list[ResolvedParameter]]
) -> Iterator[Diagnostic]:
    """Of what works together, by name, some is written and transformers' plan decides about the rest."""
    rules = {name: [p.claim for p in parameters if p.claim is not None] for name, parameters in parts.items()}
    written = {name: of_user for name, claims in rules.items() if (of_user := [c for c in claims if not c.of_hf])}
    filled = [name for name, claims in rules.items() if any(claim.of_hf for claim in claims)]
    if written and filled:
        verb = "is" if len(written) == 1 else "are"
        added = listed(f"the rest of {name}" if name in written else name for name in filled)
        yield Diagnostic(
            "SP203",
            f"{listed(written)} of {owner} {verb} written, and transformers' own plan would add {added}",
            where=target.where(*(claim for claims in written.values() for claim in claims)),
            subject=subject,
            expected="rules for all that works together, or for none of it",
            hint=f"write {added}, too, or leave {listed(written)} to transformers' plan",
        )
