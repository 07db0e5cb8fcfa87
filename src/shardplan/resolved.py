"""A plan laid over a model, as data: what each rule matched, who spoke about each module, and which rule decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from shardplan.inventory import Inventory, ModuleInfo, ParameterInfo, ancestors
from shardplan.layouts import Conversion
from shardplan.patterns import Alternative, Specificity
from shardplan.plan import Plan, Recompute, Rule, Unit
from shardplan.styles import Style

Line = TypeVar("Line", Rule, Unit, Recompute)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rule that speaks about one name.

    Attributes:
        style: None where the rule names a style that nobody knows.
        direct: False where a claim reaches down from a module above.
        part: the rule's style is made of parts, and this is the one for the name: it speaks of it directly, with the
            precedence of a claim from above.
    """

    rule: Rule
    alternative: Alternative
    style: Style | None
    direct: bool
    part: bool = False

    @property
    def precedence(self) -> tuple[int, Specificity]:
        return self.rule.layer.rank, self.alternative.specificity(subtree=self.part or not self.direct)


@dataclass(frozen=True, slots=True)
class Match:
    """What one alternative of a pattern matched."""

    alternative: Alternative
    fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matched(Generic[Line]):
    """A line of the plan with what it matched, one entry for each alternative of its pattern."""

    line: Line
    matches: tuple[Match, ...]

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(fqn for match in self.matches for fqn in match.fqns))


@dataclass(frozen=True, slots=True)
class ResolvedParameter:
    """A parameter and the rule that decides about it; ``claim`` None means that no rule does.

    ``speakers`` are all rules that spoke about it or its module, the one of highest precedence first.
    """

    info: ParameterInfo
    claim: Rule | None
    style: Style | None
    speakers: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class ResolvedModule:
    """A module, the rule that speaks directly about it, and the block that it is part of.

    Attributes:
        rule, style: the winning direct rule; None where no rule speaks or a claim from above overrides it.
        block: fqn of the nearest module above whose style opens a block.
        speakers: every rule that spoke about the module, the winner first.
        part: the rule speaks of a module above, whose style has a part for this one.
    """

    info: ModuleInfo
    rule: Rule | None
    style: Style | None
    parameters: tuple[ResolvedParameter, ...]
    block: str | None
    speakers: tuple[Candidate, ...]
    part: bool = False

    @property
    def stated(self) -> Mapping[str, Conversion | None]:
        """The edges that the rule itself states for the module, by side."""
        if self.rule is None or self.part:
            return {"input": None, "output": None}
        return {"input": self.rule.input, "output": self.rule.output}

    @property
    def fqn(self) -> str:
        return self.info.fqn

    @property
    def inside(self) -> str | None:
        """The block between whose edges the module's own parameters are used: around it, or the module itself."""
        opens = self.style is not None and self.style.opens_block
        return self.fqn if opens else self.block


@dataclass(frozen=True, slots=True)
class Tie:
    """Two rules of equal precedence that say different things about one name."""

    fqn: str
    first: Rule
    second: Rule


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan laid over a model: what each rule matched and which rule decides about each module and parameter."""

    plan: Plan
    inventory: Inventory
    styles: Mapping[str, Style]
    root: str | None
    modules: tuple[ResolvedModule, ...]
    rules: tuple[Matched[Rule], ...]
    units: tuple[Matched[Unit], ...]
    recompute: tuple[Matched[Recompute], ...]
    ties: tuple[Tie, ...]

    @cached_property
    def by_fqn(self) -> dict[str, ResolvedModule]:
        return {module.fqn: module for module in self.modules}

    @property
    def embedding(self) -> ResolvedModule | None:
        """The input embedding, where the model tells which one it is."""
        fqn = self.inventory.embedding
        return None if fqn is None else self.by_fqn[fqn]

    @property
    def head(self) -> ResolvedModule | None:
        """The module that computes logits, where the model tells which one it is."""
        fqn = self.inventory.head
        return None if fqn is None else self.by_fqn[fqn]

    def governing(self, name: str) -> Rule | None:
        """The rule that decides about a parameter or a module, or about the nearest module around it."""
        claims = [p.claim for module in self.modules for p in module.parameters if p.info.fqn == name and p.claim]
        around = (self.by_fqn[fqn].rule for fqn in (name, *ancestors(name)) if fqn in self.by_fqn)
        return next((rule for rule in (*claims, *around) if rule is not None), None)

    @cached_property
    def _by_block(self) -> dict[str | None, tuple[ResolvedModule, ...]]:
        found: dict[str | None, list[ResolvedModule]] = {}
        for module in self.modules:
            found.setdefault(module.block, []).append(module)
        return {block: tuple(modules) for block, modules in found.items()}

    def children(self, fqn: str) -> tuple[ResolvedModule, ...]:
        """The modules whose nearest block is ``fqn``."""
        return self._by_block.get(fqn, ())
