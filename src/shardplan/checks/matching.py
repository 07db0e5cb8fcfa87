"""Checks of the plan against the model's names: who is meant, who decides, who is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardplan.checks.faulty import Dead, is_answered, unknown_styles
from shardplan.checks.members import left_whole
from shardplan.checks.names import general, nearest
from shardplan.checks.target import Target, count, listed, size
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.hf.known import KNOWN_WRONG
from shardplan.hf.structure import language_model
from shardplan.inventory import ParameterInfo, ancestors
from shardplan.load import load_plan
from shardplan.plan import Recompute, Rule, Unit
from shardplan.resolve import Match, Matched
from shardplan.resources import shipped_plans
from shardplan.styles import Kind, Split


def check_architectures(target: Target) -> Iterator[Diagnostic]:
    """SP106, SP107: the plan is for this model, and its root is there."""
    plan, inventory = target.resolved.plan, target.resolved.inventory
    if plan.over_hf and not inventory.tp_plan:
        shipped = sorted({name for path in shipped_plans().values() for name in load_plan(path).architectures})
        yield Diagnostic(
            "SP106",
            f"no plan is shipped for {inventory.architectures[0]}, and transformers has none for it",
            where=plan.where,
            subject=inventory.architectures[0],
            expected=f"a model with a tp_plan, or one of {', '.join(shipped)}",
            hint="write a plan, or extend one of a model that is built alike",
        )
    elif plan.architectures and not set(plan.architectures) & set(inventory.architectures):
        yield Diagnostic(
            "SP106",
            f"plan '{plan.name}' is not for {inventory.architectures[0]}",
            where=plan.where,
            subject=inventory.architectures[0],
            expected=f"{listed(plan.architectures, 'or')}, or a class derived from one",
            hint=f"use the plan for {inventory.architectures[0]}, or add this class to `architectures` if it is built "
            "alike",
        )
    elif target.resolved.root is None:
        known = [fqn for fqn in inventory.by_fqn if fqn and general(fqn) == fqn]
        close = [name for root in plan.roots for name in nearest(root, known, limit=1)]
        top = [fqn for fqn in known if "." not in fqn]
        yield Diagnostic(
            "SP107",
            f"{inventory.architectures[0]} has no module {listed(plan.roots, 'or')} for a leading dot to stand for",
            where=plan.where,
            subject=", ".join(plan.roots),
            expected=f"`root` names a module: {listed(close or top, 'or')}",
            hint=f"did you mean `root: {close[0]}`?" if close else "correct `root`",
        )


def check_known_wrong(target: Target) -> Iterator[Diagnostic]:
    """SP106: transformers' own plan for this model is known to come out wrong."""
    model = target.resolved.inventory.architectures[0]
    wrong = KNOWN_WRONG.get(model) if target.resolved.plan.over_hf and target.mesh.has_tp else None
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
    if plan.plan.over_hf:
        yield from _left_by_transformers(target)
    if plan.plan.unmatched:
        yield _unmatched(target, plan.plan.unmatched)
    for matched in plan.rules:
        for match in matched.matches:
            if not match.fqns and matched.line.pattern.optional and _is_near_miss(target, match):
                yield _dead("SP102", target, matched.line, match, _suggestion(target.faulty.near(match)))
    yield from _dead_lines(target, plan.units)
    yield from _dead_lines(target, plan.recompute)


MUCH = 0.1  # of a model's parameters beside its ends


def _left_by_transformers(target: Target) -> Iterator[Diagnostic]:
    """SP211: what transformers' own plan says nothing of stays whole, and that may be most of the model.

    Of the language model: what stands beside it stays whole on purpose, and `check_towers` says so.
    """
    resolved, ends = target.resolved, (target.resolved.inventory.embedding, target.resolved.inventory.head)
    inside = [m for m in resolved.modules if m.fqn.startswith(language_model(resolved.inventory)) and m.fqn not in ends]
    body = [parameter for module in inside for parameter in module.parameters]
    whole = [p for p in body if p.claim and p.claim.layer.kind == "hf" and p.style and p.style.split is Split.NONE]
    share = sum(p.info.numel for p in whole) / max(sum(p.info.numel for p in body), 1)
    if share > MUCH and target.mesh.has_tp:
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


def _unmatched(target: Target, keys: tuple[str, ...]) -> Diagnostic:
    """Many of transformers' own plans name what a model of the family may have, and this one has not.

    A note, since nobody can mend a plan that comes with transformers.
    """
    model = target.resolved.inventory.architectures[0]
    shown = listed([*keys[:3], *([f"{len(keys) - 3} more"] if len(keys) > 3 else [])])
    return Diagnostic(
        "SP102",
        f"{count(len(keys), 'key')} of transformers' own plan for {model} {'match' if len(keys) > 1 else 'matches'} "
        f"nothing in it: {shown}",
        where=target.resolved.plan.where,
        subject=keys[0],
        hint="nothing to do where the model has no such module",
        severity=Severity.NOTE,
    )


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
    return bool(near) and near[0] in {general(p.fqn.rpartition(".")[0]) for p in _undecided(target)}


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
    whole, undecided = left_whole(target), _undecided(target)
    forgotten: dict[str, list[ParameterInfo]] = {}
    for parameter in undecided:
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


def _undecided(target: Target) -> list[ParameterInfo]:
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
