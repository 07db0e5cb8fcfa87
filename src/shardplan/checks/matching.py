"""Checks of the plan against the model's names: who is meant, who decides, who is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardplan.checks.target import Target, count, general, nearest, size
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.patterns import Pattern
from shardplan.plan import Layer
from shardplan.resolve import Match, Matched
from shardplan.styles import Kind


def check_architectures(target: Target) -> Iterator[Diagnostic]:
    """SP106, SP107: the plan is for this model, and its root is there."""
    plan, inventory = target.resolved.plan, target.resolved.inventory
    if plan.architectures and not set(plan.architectures) & set(inventory.architectures):
        yield Diagnostic(
            "SP106",
            f"plan '{plan.name}' is not for {inventory.architectures[0]}",
            where=plan.where,
            subject=inventory.architectures[0],
            expected=f"one of {', '.join(plan.architectures)}, or a class derived from one",
            hint="choose the plan for this architecture, or add the class name to `architectures`",
        )
    if target.resolved.root is None:
        yield Diagnostic(
            "SP107",
            f"none of the roots {', '.join(plan.roots)} is a module of {inventory.architectures[0]}",
            where=plan.where,
            subject=", ".join(plan.roots),
            expected=f"one of {', '.join(m.fqn for m in inventory.modules if m.fqn and '.' not in m.fqn)}",
            hint="correct `root`",
        )


def check_styles(target: Target) -> Iterator[Diagnostic]:
    """SP101: every style name is known."""
    known = tuple(target.resolved.styles)
    for matched in target.resolved.rules:
        rule = matched.line
        if rule.style is not None and rule.style != "null" and rule.style not in known:
            close = nearest(rule.style, known)
            yield Diagnostic(
                "SP101",
                f"unknown style '{rule.style}' for {rule.pattern}",
                where=rule.where,
                subject=rule.style,
                expected=f"one of {', '.join(known)}",
                hint=f"did you mean {' or '.join(close)}?" if close else "register a style of your own from Python",
            )


def check_dead_rules(target: Target) -> Iterator[Diagnostic]:
    """SP102, SP108: every alternative of every pattern matches something."""
    if target.resolved.root is None:
        return
    plan = target.resolved
    lines: tuple[tuple[str, tuple[Matched[Any], ...]], ...]
    lines = (("SP102", plan.rules), ("SP108", plan.units), ("SP108", plan.recompute))
    for code, matched_lines in lines:
        for matched in matched_lines:
            for match in matched.matches:
                if not match.fqns:
                    yield _dead(code, target, matched, match)


def _dead(code: str, target: Target, matched: Matched[Any], match: Match) -> Diagnostic:
    line = matched.line
    pattern: Pattern = line.pattern
    layer: Layer = line.layer
    severity = Severity.NOTE if pattern.optional else Severity.WARNING if layer.kind == "hf" else Severity.ERROR
    several = (
        f", one of {len(pattern.alternatives)} alternatives of {pattern}," if len(pattern.alternatives) > 1 else ""
    )
    return Diagnostic(
        code,
        f"{match.alternative.text}{several} matches nothing in {target.resolved.inventory.architectures[0]}",
        where=line.where,
        subject=match.alternative.text,
        expected="" if pattern.optional else "at least one module or parameter",
        hint=_suggestion(target, match),
        severity=severity,
    )


def _suggestion(target: Target, match: Match) -> str:
    """The names that differ least from what was written, or how the pattern would match elsewhere."""
    names = dict.fromkeys(general(fqn) for fqn in (*target.resolved.by_fqn, *_parameter_names(target)) if fqn)
    tokens = match.alternative.tokens
    under = [name for name in names if _suffix_matches(name, tokens)]
    if under:
        prefix = under[0].split(".")[: -len(tokens)]
        return f"it would match if prefixed with {'.'.join(prefix)} ({under[0]}); set `root`, or write the full path"
    close = nearest(".".join(tokens), names)
    return f"the nearest names are {', '.join(close)}" if close else "correct it, or mark it optional with a final '?'"


def _suffix_matches(name: str, tokens: tuple[str, ...]) -> bool:
    own = tuple(name.split("."))
    return len(own) > len(tokens) > 1 and own[-len(tokens) :] == tokens


def _parameter_names(target: Target) -> Iterator[str]:
    return (parameter.fqn for parameter in target.resolved.inventory.parameters)


def check_rule_ties(target: Target) -> Iterator[Diagnostic]:
    """SP103: no two rules of equal rank say different things about one name."""
    for tie in target.resolved.ties:
        yield Diagnostic(
            "SP103",
            f"{tie.first.pattern} and {tie.second.pattern} ({tie.second.where}) both claim {tie.fqn} with equal rank",
            where=tie.first.where,
            subject=tie.fqn,
            expected="one rule that is more specific, or both saying the same",
            hint="write one of the patterns more precisely; literal > range > glob > * > **, then @Class",
        )


def check_claims(target: Target) -> Iterator[Diagnostic]:
    """SP104: every parameter is decided about. An omission would replicate it in silence."""
    forgotten: dict[str, list[int]] = {}
    for module in target.resolved.modules:
        for parameter in module.parameters:
            if parameter.claim is None:
                forgotten.setdefault(general(parameter.info.fqn), []).append(parameter.info.nbytes)
    for name, sizes in forgotten.items():
        yield Diagnostic(
            "SP104",
            f"no rule decides about {name} ({count(len(sizes), 'parameter')}, {size(sum(sizes))})",
            where=target.resolved.plan.where,
            subject=name,
            expected="a rule for every parameter",
            hint=f"give it a style, or write `{name.rpartition('.')[0] or name}: null` to replicate it on purpose",
        )


def check_kinds(target: Target) -> Iterator[Diagnostic]:
    """SP105: a style that splits weights stands on a module whose weights it can split."""
    for module in target.resolved.modules:
        style, rule = module.style, module.rule
        if style is None or rule is None or not style.kinds or module.info.kind in style.kinds:
            continue
        kinds = " or ".join(kind.value for kind in style.kinds)
        yield Diagnostic(
            "SP105",
            f"style {style.name} cannot split {general(module.fqn)}, a {module.info.class_name}",
            where=rule.where,
            subject=general(module.fqn),
            expected=f"a module of kind {kinds}",
            hint=_fitting(module.info.kind, style.split.value),
        )


def _fitting(kind: Kind, split: str) -> str:
    if kind is Kind.EMBEDDING:
        return "an embedding takes embedding_rowwise"
    if kind is Kind.LINEAR:
        return "a linear takes colwise or rowwise"
    return f"name the linears inside it whose {split} features are to be cut"


def check_units(target: Target) -> Iterator[Diagnostic]:
    """SP109: FSDP2 units are modules that run, and no unit separates tied parameters."""
    unit_of: dict[str, str] = {}
    for matched in target.resolved.units:
        for fqn in matched.fqns:
            unit_of[fqn] = fqn
            if target.resolved.by_fqn[fqn].info.container:
                yield Diagnostic(
                    "SP109",
                    f"{fqn} is a {target.resolved.by_fqn[fqn].info.class_name}, whose forward never runs",
                    where=matched.line.where,
                    subject=fqn,
                    expected="a module that is called in the forward",
                    hint=f"name its members: {fqn}.*",
                )
    for group in target.resolved.inventory.ties:
        units = {parameter.fqn: _unit_around(parameter.fqn, unit_of) for parameter in group}
        if len(set(units.values())) > 1:
            yield Diagnostic(
                "SP109",
                "tied parameters lie in different FSDP2 units: "
                + ", ".join(f"{fqn} in {unit or 'the root'}" for fqn, unit in units.items()),
                where=target.resolved.plan.where,
                subject=group[0].fqn,
                expected="both in one unit",
                hint="take the units that hold only one of them out of fsdp.units; the root then holds both",
            )


def _unit_around(fqn: str, units: dict[str, str]) -> str:
    while fqn:
        fqn = fqn.rpartition(".")[0]
        if fqn in units:
            return fqn
    return ""
