"""Checks of what transformers' own plan comes to for a model: known to be wrong, or little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized

from shardplan.checks.groups import Group
from shardplan.checks.names import general
from shardplan.checks.target import Target, count, listed, size
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.hf.known import KNOWN_WRONG
from shardplan.hf.structure import language_model
from shardplan.inventory import ParameterInfo
from shardplan.resolved import ResolvedParameter
from shardplan.styles import Split

MUCH = 0.1  # of a model's parameters beside its ends


def check_known_wrong(target: Target) -> Iterator[Diagnostic]:
    """SP106: transformers' own plan for this model is known to come out wrong."""
    model = target.resolved.inventory.architectures[0]
    wrong = KNOWN_WRONG.get(model) if target.mesh.has_tp and any(_of_hf(target)) else None
    if wrong is not None and (target.sequence_parallel or not wrong.on_cut_stream_alone):
        mode = " under sequence parallelism" if wrong.on_cut_stream_alone else ""
        instead = "turn sequence parallelism off" if wrong.on_cut_stream_alone else "write a plan of your own"
        yield Diagnostic(
            "SP106",
            f"transformers' own plan for {model}, completed, is wrong{mode}: {wrong.reason}",
            where=target.resolved.plan.where,
            subject=model,
            expected="a model for which it is proven (docs/coverage.md)",
            hint=instead,
        )


def check_left_by_transformers(target: Target) -> Iterator[Diagnostic]:
    """SP211: what transformers' own plan says nothing of stays whole, and that may be most of the model.

    Of the language model: what stands beside it stays whole on purpose, and `check_towers` says so.
    """
    resolved, ends = target.resolved, (target.resolved.inventory.embedding, target.resolved.inventory.head)
    if not target.mesh.has_tp:
        return
    inside = [m for m in resolved.modules if m.fqn.startswith(language_model(resolved.inventory)) and m.fqn not in ends]
    body = [parameter for module in inside for parameter in module.parameters]
    whole = [p for p in body if p.claim and p.claim.of_hf and p.style and p.style.split is Split.NONE]
    share = sum(p.info.numel for p in whole) / max(sum(p.info.numel for p in body), 1)
    if share > MUCH:
        largest = sorted(whole, key=lambda p: -p.info.numel)
        names = list(dict.fromkeys(general(parameter.info.fqn) for parameter in largest))
        yield Diagnostic(
            "SP211",
            f"{100 * share:.0f} % of {resolved.inventory.architectures[0]} beside its ends stay whole over tp: "
            f"transformers' own plan does not say how to cut {listed(names[:3])}",
            where=resolved.plan.where,
            subject=names[0],
            expected="rules for what is large",
            hint="start from `plan-compile --init` and add them",
            severity=Severity.WARNING,
        )


def check_unmatched(target: Target) -> Iterator[Diagnostic]:
    """SP102: many of transformers' own plans name what a model of the family may have, and this one has not.

    A note, since nobody can mend a plan that comes with transformers.
    """
    model, keys = target.resolved.inventory.architectures[0], target.resolved.plan.unmatched
    if not keys or target.resolved.plan.filled:
        return
    yield Diagnostic(
        "SP102",
        f"{count(len(keys), 'key')} of transformers' own plan for {model} {'match' if len(keys) > 1 else 'matches'} "
        f"nothing in it: {_first(keys)}",
        where=target.resolved.plan.where,
        subject=keys[0],
        hint="nothing to do where the model has no such module",
        severity=Severity.NOTE,
    )


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
    for parameter in _of_hf(target):
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
        f"transformers' own plan decides about {what} of which no rule speaks: {_first(names)}",
        where=target.resolved.plan.where,
        subject=names[0],
        expected="",
        hint="`plan-compile` prints what it says of them as [hf]; `fallback: none` leaves them alone",
        severity=Severity.NOTE,
    )


def _by_member(group: Group) -> dict[str, list[ResolvedParameter]]:
    """The parameters of linears that are cut, or that the user speaks of: transformers' plan may call routers whole."""
    return {
        member.name: list(member.module.parameters)
        for member in group.members
        if member.role != "whole" or any(p.claim is not None and not p.claim.of_hf for p in member.module.parameters)
    }


def _completed(
    target: Target, owner: str, subject: str, parts: Mapping[str, list[ResolvedParameter]]
) -> Iterator[Diagnostic]:
    """Of what works together, by name, some is written and transformers' plan decides about the rest."""
    rules = {name: [p.claim for p in parameters if p.claim is not None] for name, parameters in parts.items()}
    written = {name: of_user for name, claims in rules.items() if (of_user := [c for c in claims if not c.of_hf])}
    filled = [name for name, claims in rules.items() if any(claim.of_hf for claim in claims)]
    if written and filled:
        added = listed(f"the rest of {name}" if name in written else name for name in filled)
        yield Diagnostic(
            "SP203",
            f"{listed(written)} of {owner} {_are(written)} written, and transformers' own plan would add {added}",
            where=target.where(*(claim for claims in written.values() for claim in claims)),
            subject=subject,
            expected="rules for all that works together, or for none of it",
            hint=f"write {added}, too, or leave {listed(written)} to transformers' plan",
        )


def _of_hf(target: Target) -> Iterator[ResolvedParameter]:
    """The parameters about which transformers' plan, completed, decides."""
    parameters = (p for module in target.resolved.modules for p in module.parameters)
    yield from (p for p in parameters if p.claim is not None and p.claim.of_hf)


def _first(names: Sequence[str]) -> str:
    more = len(names) - 3
    return listed([*names[:3], *([f"{more} more"] if more > 0 else [])])


def _are(members: Sized) -> str:
    return "is" if len(members) == 1 else "are"
