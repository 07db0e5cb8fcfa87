"""Checks of lines that come to nothing: styles that nobody knows, patterns that match no module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardplan.checks.claims import undecided
from shardplan.checks.faulty import Dead, is_answered, unknown_styles
from shardplan.checks.names import general
from shardplan.checks.target import Target, count, listed
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.plan import Recompute, Rule, Unit
from shardplan.resolved import Match, Matched


def check_styles(target: Target) -> Iterator[Diagnostic]:
    """SP101: every style name is known."""
    return unknown_styles((matched.line for matched in target.resolved.rules), target.resolved.styles)


def check_dead_rules(target: Target) -> Iterator[Diagnostic]:
    """SP102, SP108: every alternative of every pattern matches something; inherited rules only should."""
    plan, faulty = target.resolved, target.faulty
    misplaced = [dead for dead in faulty.dead if faulty.prefix in dead.elsewhere]
    if misplaced:
        yield _misplaced(target, misplaced)
    for dead in faulty.dead:
        if dead not in misplaced:
            yield _dead("SP102", target, dead.rule, dead.match, _way_out(dead))
    for dead in faulty.inherited:
        yield _dead("SP102", target, dead.rule, dead.match)
    for matched in plan.rules:
        for match in matched.matches:
            if not match.fqns and matched.line.pattern.optional and _is_near_miss(target, match):
                yield _dead("SP102", target, matched.line, match, _suggestion(target.faulty.near(match)))
    yield from _dead_lines(target, plan.units)
    yield from _dead_lines(target, plan.recompute)


def _dead_lines(target: Target, lines: tuple[Matched[Any], ...]) -> Iterator[Diagnostic]:
    faulty = target.faulty
    for matched in lines:
        for written, match in zip(matched.line.pattern.alternatives, matched.matches, strict=True):
            found = dict(faulty.elsewhere(written.tokens, relative=written.relative))
            due = not matched.line.pattern.optional and not is_answered(lines, matched, match)
            if not match.fqns and due and faulty.prefix not in found:
                yield _dead("SP108", target, matched.line, match, _suggestion(target.faulty.near(match)))


def _misplaced(target: Target, dead: list[Dead]) -> Diagnostic:
    """Many rules that all look in one wrong place, as one finding."""
    prefix = target.faulty.prefix
    assert prefix is not None
    plan, root = target.resolved.plan, target.resolved.root
    first = next((entry for entry in dead if not target.inherited(entry.rule)), dead[0])
    fqns = {fqn for entry in dead for fqn in entry.elsewhere.get(prefix, ())}
    also = {other for entry in dead for other in entry.elsewhere} - {prefix}
    place = f" under {root}" if root else ""
    return Diagnostic(
        "SP102",
        f"{len(dead)} patterns match nothing{place} in {target.resolved.inventory.architectures[0]}, "
        f"such as {first.rule.pattern.text}",
        where=plan.where if target.inherited(first.rule) else first.rule.where,
        subject=first.rule.pattern.text,
        expected=f"paths under {prefix}, where these patterns match {count(len(fqns), 'module')}"
        + (f" (some would also match under {listed(sorted(also))})" if also else ""),
        hint=f"they match if prefixed with {prefix}" + ("" if "*" in prefix else f": write `root: [{prefix}]`"),
    )


def _dead(code: str, target: Target, line: Rule | Unit | Recompute, match: Match, hint: str = "") -> Diagnostic:
    """Of an inherited line only a warning: it was written for other models, too."""
    optional = line.pattern.optional
    inherited = target.inherited(line) and not optional
    alternatives = len(line.pattern.alternatives)
    several = f", one of {alternatives} alternatives of {line.pattern}," if alternatives > 1 else ""
    return Diagnostic(
        code,
        f"{match.alternative.text}{several} matches nothing in {target.resolved.inventory.architectures[0]}",
        where=line.where,
        subject=match.alternative.text,
        expected="" if optional or inherited else "at least one match for every alternative, or a final '?'",
        hint=_answer(target, line, match) if inherited else hint,
        severity=Severity.NOTE if optional else Severity.WARNING if inherited else Severity.ERROR,
    )


def _answer(target: Target, line: Rule | Unit | Recompute, match: Match) -> str:
    """What to write in the upper plan where the lower one cannot be edited."""
    pattern = f'"{target.spell(match.alternative.text)}?"'
    if isinstance(line, Rule):
        edges = [f"{side}: {edge}" for side, edge in (("input", line.input), ("output", line.output)) if edge]
        options = ", ".join([f"style: {line.style}"] * (line.style is not None) + edges)
        answer = f"{pattern}: {f'{{{options}}}' if edges else line.style}"
    else:
        answer = (
            f"{pattern}: {{}}` under `fsdp: units:" if isinstance(line, Unit) else f"- {pattern}` under `recompute:"
        )
    return f"if this model has none, say so in the plan above: `{answer}`"


def _way_out(dead: Dead) -> str:
    if dead.elsewhere:
        by_number = sorted(dead.elsewhere.items(), key=lambda item: -len(item[1]))
        places = [f"{prefix} ({count(len(fqns), 'module')}, such as {fqns[0]})" for prefix, fqns in by_number]
        return f"it matches if prefixed with {listed(places, 'or')}"
    if dead.near and dead.left:
        return f"did you mean {dead.near[0]}? No other rule speaks of it"
    return _suggestion(dead.near)


def _suggestion(near: tuple[str, ...]) -> str:
    return f"the nearest names are {listed(near)}" if near else "correct it, or mark it optional with a final '?'"


def _is_near_miss(target: Target, match: Match) -> bool:
    """Whether an optional pattern looks like the misspelt name of a module that is left without a rule."""
    near = target.faulty.near(match)
    return bool(near) and near[0] in {general(p.fqn.rpartition(".")[0]) for p in undecided(target)}
