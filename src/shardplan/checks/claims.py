"""Checks that every parameter is decided about, and by one rule."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.members import left_whole
from shardplan.checks.names import general
from shardplan.checks.target import Target, count, size
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.inventory import ParameterInfo, ancestors
from shardplan.styles import Kind, Split


def check_rule_ties(target: Target) -> Iterator[Diagnostic]:
    """SP103: no two rules of equal rank say different things about one name."""
    for tie in target.resolved.ties:
        yield Diagnostic(
            "SP103",
            f"{tie.first.pattern} and {tie.second.pattern} ({tie.second.where}) both claim {tie.fqn} and neither is "
            "more specific",
            where=tie.first.where,
            subject=tie.fqn,
            expected="one rule that is more specific, or both saying the same",
            hint="write one of the patterns more precisely: a name beats [0-3], which beats a_*, then *, then **; "
            "then @Class beats none",
        )


def check_claims(target: Target) -> Iterator[Diagnostic]:
    """SP104: every parameter is decided about. An omission would replicate it in silence.

    Where replication is harmless it is only said: of what a dict plan does not name, since that is what it means there,
    and of norms and the like, which no plan cuts.
    Linears that another check finds missing from their group, and parameters tied to a decided one, are left to that.
    """
    whole = left_whole(target)
    forgotten: dict[str, list[ParameterInfo]] = {}
    for parameter in undecided(target):
        if parameter.fqn.rpartition(".")[0] not in whole and not target.explained(parameter.fqn):
            forgotten.setdefault(general(_forgotten_whole(target, parameter.fqn)), []).append(parameter)
    for name, parameters in forgotten.items():
        harmless = all(_is_harmless(target, parameter) for parameter in parameters)
        nbytes = sum(parameter.nbytes for parameter in parameters)
        replicated = " and it is replicated" if harmless else ""
        yield Diagnostic(
            "SP104",
            f"no rule decides about {name} ({count(len(parameters), 'parameter')}, {size(nbytes)}){replicated}",
            where=target.resolved.plan.where,
            subject=name,
            expected="a rule for every parameter",
            hint=f"give it a style, or write `{target.spell(name)}: null` to replicate it on purpose",
            severity=Severity.WARNING if harmless else Severity.ERROR,
        )


def _is_harmless(target: Target, parameter: ParameterInfo) -> bool:
    return _may_be_omitted(target, parameter.fqn) and (
        target.resolved.plan.omits_silently or _cannot_be_cut(target, parameter)
    )


def _cannot_be_cut(target: Target, parameter: ParameterInfo) -> bool:
    """Whether it is a vector of a module that no style splits: replicated in any case."""
    module = target.resolved.by_fqn[next(ancestors(parameter.fqn))]
    return module.info.kind is Kind.OTHER and len(parameter.shape) == 1


def _may_be_omitted(target: Target, fqn: str) -> bool:
    """Whether a replicated parameter's gradient is complete: off the cut stream, and not among split linears."""
    module = next(ancestors(fqn))
    if target.sequence_parallel and target.stream.carries(module):
        return False
    around = next(ancestors(module), "")
    siblings = (m for m in target.resolved.modules if m.fqn and next(ancestors(m.fqn)) == around)
    splits = [m for m in siblings if m.info.kind.is_linear and m.style and m.style.split is not Split.NONE]
    return len(splits) < 2


def undecided(target: Target) -> list[ParameterInfo]:
    """Parameters that no rule claims under any of their names."""
    parameters = [parameter for module in target.resolved.modules for parameter in module.parameters]
    decided = {parameter.info.identity for parameter in parameters if parameter.claim is not None}
    return [p.info for p in parameters if p.claim is None and p.info.identity not in decided]


def _forgotten_whole(target: Target, parameter: str) -> str:
    """The largest module around a parameter of which no rule says anything."""
    whole = parameter
    for fqn in ancestors(parameter):
        if not fqn or fqn in target.faulty.spoken_around:
            break
        if not target.resolved.inventory.by_fqn[fqn].container:
            whole = fqn
    return whole
