"""A lock: what plans come to, written into a file that is small enough to review, and compared with it later.

It names no lines and no absolute paths, so that only what changes a compiled plan changes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shardplan.compiled import CompiledPlan
from shardplan.diff import Change, differences
from shardplan.facts import Fact, Value, Values, facts_of, rows, structure, totals


@dataclass(frozen=True, slots=True)
class Locked:
    """A plan in one situation: on one model and mesh and in one mode (``TP`` or ``SP``)."""

    plan: str
    model: str
    mesh: str
    mode: str
    totals: Values
    facts: tuple[Fact, ...]

    @classmethod
    def of(cls, plan: str, model: str, compiled: CompiledPlan, *, sequence_parallel: bool) -> Locked:
        mode = "SP" if sequence_parallel else "TP"
        return cls(plan, model, str(compiled.mesh), mode, totals(compiled), structure(compiled))

    @property
    def situation(self) -> str:
        return f"{self.model} {self.mesh} {self.mode}"


@dataclass(frozen=True, slots=True)
class Broken:
    """What does not hold: changes in one situation; or a situation that only one side knows."""

    situation: str
    changes: tuple[Change, ...] = ()
    kind: Literal["changed", "not locked", "no longer checked"] = "changed"


def broken(locked: Iterable[Locked], now: Iterable[Locked], *, narrowed: bool) -> Iterator[Broken]:
    """Compare one plan with its lock, situation by situation.

    Args:
        locked: what the lock says of the plan.
        now: what the plan comes to.
        narrowed: whether only some of the plan's situations were asked for.
    """
    old, new = ({entry.situation: entry for entry in entries} for entries in (locked, now))
    for situation, entry in new.items():
        if situation not in old:
            yield Broken(situation, kind="not locked")
        elif changes := differences(_all(old[situation]), _all(entry)):
            yield Broken(situation, changes)
    for situation in () if narrowed else old.keys() - new.keys():
        yield Broken(situation, kind="no longer checked")


def _all(entry: Locked) -> tuple[Fact, ...]:
    return (*entry.facts, Fact("totals", "(the model)", entry.totals))


# ---------------------------------------------------------------- the file


class _Model(BaseModel):
    """A model with the situations that come to the same; facts by section and by name with ranges."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    situations: dict[str, dict[str, Value]]
    facts: dict[str, dict[str, dict[str, Value]]]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    plans: dict[str, list[_Model]]


def lock_text(entries: Iterable[Locked]) -> str:
    """The file: a line for each kind of parameter, edge or unit, and for each situation."""
    alike: dict[tuple[str, str, tuple[Fact, ...]], list[Locked]] = {}
    for entry in entries:
        alike.setdefault((entry.plan, entry.model, entry.facts), []).append(entry)
    plans: dict[str, list[Any]] = {}
    for (plan, model, facts), same in alike.items():
        situations = {f"{entry.mesh} {entry.mode}": dict(entry.totals) for entry in same}
        plans.setdefault(plan, []).append({"model": model, "situations": situations, "facts": _sections(facts)})
    return _json({"format": 1, "plans": dict(sorted(plans.items()))}) + "\n"


def _sections(facts: Iterable[Fact]) -> dict[str, dict[str, dict[str, Value]]]:
    sections: dict[str, dict[str, dict[str, Value]]] = {}
    for row in rows(facts):
        sections.setdefault(row.section, {})[row.names] = dict(row.values)
    return sections


def read_lock(text: str) -> tuple[Locked, ...]:
    """What a lock file says.

    Raises:
        ValueError: it is no lock, or of another format.
    """
    try:
        file = _File.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(_reason(error)) from None
    return tuple(_locked(file))


def _reason(error: ValidationError) -> str:
    """What is missing at the top; else the first thing that is wrong, with its place."""
    missing = [str(e["loc"][0]) for e in error.errors() if e["type"] == "missing" and len(e["loc"]) == 1]
    if missing:
        return f"it has no {' and no '.join(missing)}"
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def _locked(file: _File) -> Iterator[Locked]:
    for plan, models in file.plans.items():
        for model in models:
            facts = tuple(_facts(model.facts))
            for situation, counts in model.situations.items():
                mesh, _, mode = situation.partition(" ")
                yield Locked(plan, model.model, mesh, mode, tuple(counts.items()), facts)


def _facts(sections: Mapping[str, Mapping[str, Mapping[str, Value]]]) -> Iterator[Fact]:
    for section, named in sections.items():
        for names, values in named.items():
            yield from facts_of(section, names, tuple(values.items()))


def _json(data: Any, indent: str = "") -> str:
    """JSON with a line for each innermost object, which `json` alone breaks up."""
    if isinstance(data, list):
        lines = [_json(item, indent + "  ") for item in data]
        return "[" + ",".join(f"\n{indent}  {line}" for line in lines) + f"\n{indent}]"
    if isinstance(data, dict) and any(isinstance(value, dict | list) for value in data.values()):
        lines = [f"{json.dumps(key)}: {_json(value, indent + '  ')}" for key, value in data.items()]
        return "{" + ",".join(f"\n{indent}  {line}" for line in lines) + f"\n{indent}}}"
    return json.dumps(data)
