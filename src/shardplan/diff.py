"""What changes from one set of facts to another, said once for all names that it holds of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardplan.checks.names import general
from shardplan.checks.target import size
from shardplan.facts import Fact, Value, Values
from shardplan.ranged import ranged


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that changes; None before, or after, where the name is new, or gone."""

    name: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True)
class Change:
    """The same change of one name or of many, ``model.layers.[0-31].mlp``; ``kind`` is new, gone or changed."""

    section: str
    names: str
    count: int
    kind: str
    fields: tuple[Field, ...]

    def __str__(self) -> str:
        if self.kind == "gone":
            return f"{self.names}: gone, it was {_listed((f.name, f.before) for f in self.fields)}"
        if self.kind == "new":
            return f"{self.names}: new, {_listed((f.name, f.after) for f in self.fields)}"
        return f"{self.names}: " + ", ".join(
            f"{_words(f.name)} {spoken(f.name, f.before)} -> {spoken(f.name, f.after)}" for f in self.fields
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Two plans in their situations, and all that changes from the first to the second."""

    before: str
    after: str
    changes: tuple[Change, ...]


def differences(before: Iterable[Fact], after: Iterable[Fact]) -> tuple[Change, ...]:
    """Every fact that is not the same in both, in the order of the first, then of the second."""
    old, new = ({(fact.section, fact.name): fact.values for fact in facts} for facts in (before, after))
    alike: dict[tuple[str, str, str, tuple[Field, ...]], list[str]] = {}
    for section, name in dict.fromkeys((*old, *new)):
        was, now = old.get((section, name)), new.get((section, name))
        kind = "new" if was is None else "gone" if now is None else "changed"
        if (changed := _fields(was or (), now or ())) or kind != "changed":
            alike.setdefault((section, general(name), kind, changed), []).append(name)
    return tuple(
        Change(section, short, count, kind, changed)
        for (section, _, kind, changed), names in alike.items()
        for short, count in ranged(names).items()
    )


def _fields(before: Values, after: Values) -> tuple[Field, ...]:
    old, new = dict(before), dict(after)
    names = dict.fromkeys((*old, *new))
    return tuple(Field(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def spoken(name: str, value: Value) -> str:
    """A value for people."""
    if value is None:
        return "default" if name == "reshard" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return size(value) if isinstance(value, int) and name.startswith("nbytes") else str(value)


def _words(name: str) -> str:
    return name.replace("nbytes", "bytes").replace("_", " ")


def _listed(values: Iterable[tuple[str, Value]]) -> str:
    return ", ".join(f"{_words(name)} {spoken(name, value)}" for name, value in values)
