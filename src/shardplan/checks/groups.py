"""What works together: the linears of one block, or siblings that hand each other cut activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.checks.faulty import FaultyRules
from shardplan.checks.names import general, last
from shardplan.inventory import ancestors
from shardplan.layouts import PARTIAL, REPLICATE, Layout, shard
from shardplan.plan import Rule
from shardplan.residual import input_conversion, output_conversion
from shardplan.resolve import ResolvedModule, ResolvedPlan
from shardplan.styles import Gradient, Split

FEATURES = shard(-1)


@dataclass(frozen=True, slots=True)
class Member:
    """A linear with the layout that it takes and the one that it gives, as its style and its rule say."""

    module: ResolvedModule
    takes: Layout
    gives: Layout

    @property
    def name(self) -> str:
        return last(self.module.fqn)

    @property
    def rule(self) -> Rule | None:
        return self.module.rule

    @property
    def role(self) -> str:
        """``consumer`` of cut features, ``producer`` of them, or ``whole``."""
        return "consumer" if self.takes == FEATURES else "producer" if self.gives == FEATURES else "whole"


@dataclass(frozen=True, slots=True)
class Group:
    """The linears of a block, or, where no block is, those of one parent of which some are cut."""

    owner: ResolvedModule
    members: tuple[Member, ...]

    @property
    def is_block(self) -> bool:
        return self.owner.style is not None and self.owner.style.opens_block

    @property
    def name(self) -> str:
        return f"block {general(self.owner.fqn)}" if self.is_block else general(self.owner.fqn) or "the model"

    def of_role(self, role: str) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == role)

    def whole(self) -> tuple[Member, ...]:
        """Members that are not cut and do not say that they see a part of the work only."""
        return tuple(member for member in self.of_role("whole") if not _says_partial(member.module))


def find_groups(resolved: ResolvedPlan, faulty: FaultyRules) -> Iterator[Group]:
    """The groups whose rules are not at fault already."""
    members: dict[str, list[Member]] = {}
    for module in resolved.modules:
        if module.info.kind.is_linear and module.fqn != resolved.inventory.head:
            around = module.block if module.block is not None else next(ancestors(module.fqn), "")
            members.setdefault(around, []).append(_member(module))
    for owner in resolved.modules:
        group = Group(owner, tuple(members.get(owner.fqn, ())))
        cut = any(member.role != "whole" for member in group.members)
        if (group.is_block or cut) and not _waits(faulty, group):
            yield group


def _waits(faulty: FaultyRules, group: Group) -> bool:
    """Whether a faulty rule, or a torch style, whose layouts are its own affair, leaves nothing to say."""
    natives = (m.module.style is not None and m.module.style.native is not None for m in group.members)
    return any(natives) or any(faulty.explains(member.module.fqn) for member in group.members)


def _member(module: ResolvedModule) -> Member:
    taken, given, split = input_conversion(module), output_conversion(module), module.style and module.style.split
    inside = {Split.INPUT: (FEATURES, PARTIAL), Split.OUTPUT: (REPLICATE, FEATURES)}
    takes, gives = inside.get(split, (REPLICATE, REPLICATE)) if split else (REPLICATE, REPLICATE)
    return Member(module, taken.source if taken else takes, given.target if given else gives)


def _says_partial(module: ResolvedModule) -> bool:
    """A whole linear that its rule declares to see a part of the work: a router, a latent projection."""
    return all(p.style is not None and p.style.gradient is Gradient.PARTIAL for p in module.parameters)
