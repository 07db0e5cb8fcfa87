"""A plan as the text of a plan file: what a person would write, with a remark on where each rule comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import yaml

from shardplan.plan import NULL, Plan, Rule, Unit

_SCHEMA = "# yaml-language-server: $schema=plan.schema.json"  # plan-compile --schema > plan.schema.json
WIDTH = 60  # of a rule; remarks stand behind it


def plan_text(
    plan: Plan,
    head: Sequence[str],
    architectures: Iterable[str] = (),
    root: str = "",
    remark: Callable[[Rule], str] = lambda _: "",
) -> str:
    """Write ``plan`` down.

    Args:
        plan: its rules, units and options; layers are not told apart.
        head: lines for the head of the file.
        architectures: the classes that the plan is for.
        root: what a leading dot shall stand for; names below it are written relative to it.
        remark: what is said behind a rule.

    Raises:
        ValueError: a rule holds a torch style that is applied as it stands, which no file can say.
    """
    lines = [_SCHEMA, *(f"# {line}".rstrip() for line in head), "format: 1"]
    lines += [f"architectures: {_flow(list(architectures))}"] if architectures else []
    lines += [f"root: {_flow([root])}"] if root else []
    rules = ["", "rules:", *(_rule(rule, root, remark) for rule in plan.rules)] if plan.rules else []
    return "\n".join([*lines, *rules, *_fsdp(plan, root), *_options(plan)]) + "\n"


def _rule(rule: Rule, root: str, remark: Callable[[Rule], str]) -> str:
    if rule.native is not None:
        raise ValueError(f"{rule.pattern} is {type(rule.native).__name__}, which a plan file cannot say")
    line = f"  {_flow(_relative(rule.pattern.text, root))}: {_value(rule)}"
    return f"{line:<{WIDTH}} # {said}" if (said := remark(rule)) else line


def _value(rule: Rule) -> str:
    stated: dict[str, Any] = {
        "style": rule.style,
        "input": rule.input and str(rule.input),
        "output": rule.output and str(rule.output),
        "dim": rule.dim,
        "sections": [{s.name: int(s.size) if s.size.isdigit() else s.size} for s in rule.sections],
        "local_sizes": list(rule.local_sizes),
    }
    said = {name: value for name, value in stated.items() if value not in (None, [])}
    if rule.style == NULL:
        said["style"] = None
    return _flow(said["style"]) if list(said) == ["style"] else _flow(said)


def _fsdp(plan: Plan, root: str) -> Iterator[str]:
    if plan.units or plan.root_reshard is not None:
        yield from ("", "fsdp:")
    if plan.units:
        yield "  units:"
        yield from (f"    {_flow(_relative(unit.pattern.text, root))}: {_unit(unit)}" for unit in plan.units)
    if plan.root_reshard is not None:
        yield f"  root: {_flow({'reshard': plan.root_reshard})}"


def _unit(unit: Unit) -> str:
    return _flow({} if unit.reshard is None else {"reshard": unit.reshard})


def _options(plan: Plan) -> Iterator[str]:
    options = {"sequence_parallel": plan.sequence_parallel, "logits": plan.logits, "cpu_offload": plan.cpu_offload}
    if plan.recompute is not None:
        yield f"recompute: {_flow([entry.pattern.text for entry in plan.recompute])}"
    yield from (f"{name}: {_flow(value)}" for name, value in options.items() if value is not None)


def _relative(text: str, root: str) -> str:
    return text.removeprefix(root) if root and text.startswith(f"{root}.") else text


def _flow(value: Any) -> str:
    """YAML on one line, quoted where it must be."""
    text: str = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10**6).strip()
    return text[1:-1]
