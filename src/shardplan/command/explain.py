"""``plan-compile --explain NAME``: which rules spoke of a module or parameter, which won and why, what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from shardplan.command.answer import Compiled, compile_first, require_model
from shardplan.command.request import Request
from shardplan.findings import Findings

if TYPE_CHECKING:
    from shardplan.explain import Direction, ExplainedParameter, Explanation, Spoken


def explain_one(
    plan: str, names: Sequence[str], request: Request, findings: Findings, *, printing: bool
) -> Iterator[dict[str, Any]]:
    """Explain what one plan says of ``names`` on the first model and mesh that it is for."""
    compiled = require_model(plan, compile_first(plan, request, findings), findings, "--explain")
    for name in names if compiled else ():
        assert compiled is not None
        explanations = _explain(compiled, name)
        if printing:
            click.echo("\n".join(text(explanation) for explanation in explanations))
        yield from (
            {"plan": plan, "on": str(compiled.situation), **asdict(explanation)} for explanation in explanations
        )


def _explain(compiled: Compiled, name: str) -> tuple[Explanation, ...]:
    from shardplan.checks.names import general, nearest
    from shardplan.checks.target import listed
    from shardplan.explain import explain, known_names

    target = compiled.situation.target
    try:
        found = explain(target, compiled.plan, name)
    except ValueError as error:
        raise click.BadParameter(f"'{name}' is no name and no pattern: {error}", param_hint="--explain") from None
    if not found:
        close = nearest(general(name), map(general, known_names(target)))
        hint = f"; the nearest names are {listed(close)}" if close else ""
        model = target.resolved.inventory.architectures[0]
        raise click.BadParameter(f"{model} has no '{name}'{hint}", param_hint="--explain")
    return found


def text(explanation: Explanation) -> str:
    """For people."""
    number = f"{explanation.count} {explanation.kind}s, " if explanation.count > 1 else f"{explanation.kind}, "
    of = "of " if explanation.kind == "parameter" else ""
    lines = [f"{explanation.names or 'the model'} ({number}{of}{explanation.module})"]
    lines += ["  rules, in order of precedence:" if explanation.rules else "  no rule speaks of it"]
    lines += [line for rule in explanation.rules for line in _rule(rule)]
    lines += [f"  block: {explanation.block}, whose edges serve it"] if explanation.block is not None else []
    if explanation.parameters is None:
        return "\n".join([*lines, "  nothing comes of it: the plan is refused", ""])
    for edge in explanation.edges or ():
        lines.append(f"  {edge.side}: {edge.conversion}")
        lines.append(f"    tensor parallel: {_direction(edge.tensor_parallel)}")
        lines.append(f"    sequence parallel: {_direction(edge.sequence_parallel)}")
    lines += [line for parameter in explanation.parameters for line in _parameter(parameter)]
    unit = "none, the mesh has no dp axis" if explanation.unit is None else explanation.unit or "the model"
    lines += [f"  FSDP2 unit: {unit}"]
    lines += [f"  recomputed with {explanation.recomputed}"] if explanation.recomputed is not None else []
    return "\n".join([*lines, ""])


def _rule(rule: Spoken) -> list[str]:
    reach = "" if rule.direct else ", reaching down from above"
    return [
        f"    {'->' if rule.wins else '  '} {rule.pattern}: {rule.says}  {rule.where} {rule.layer}{reach}",
        *([f"         {rule.why}"] if rule.why else []),
    ]


def _direction(direction: Direction | None) -> str:
    if direction is None:
        return "nothing"
    return f"{direction.forward} in the forward, {direction.backward} in the backward"


def _parameter(parameter: ExplainedParameter) -> list[str]:
    shape = " x ".join(map(str, parameter.shape)) or "one number"
    gradient = "" if parameter.placement != "replicate" else f", gradient on each rank: {parameter.gradient}"
    lines = [f"  {parameter.name} ({shape}): {parameter.placement}{gradient}"]
    lines += [f"    decided by {parameter.rule}" if parameter.rule else "    no rule decides: replicated by omission"]
    return lines + [f"    one parameter with {', '.join(parameter.tied_to)}"] * bool(parameter.tied_to)
