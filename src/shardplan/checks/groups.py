"""What works together: the linears of one block, or siblings that hand each other cut activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.checks.faulty import FaultyRules
from shardplan.checks.names import general, last
from shardplan.experts import GIVING
from shardplan.inventory import ancestors
from shardplan.layouts import PARTIAL, REPLICATE, Layout, shard
from shardplan.plan import Rule
from shardplan.residual import input_conversion, output_conversion
from shardplan.resolved import ResolvedModule, ResolvedPlan
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
    latent: frozenset[int] = frozenset()  # widths that fused experts take whole, and that are not the stream's

    @property
    def is_block(self) -> bool:
        return self.owner.style is not None and self.owner.style.opens_block

    @property
    def name(self) -> str:
        return f"block {general(self.owner.fqn)}" if self.is_block else general(self.owner.fqn) or "the model"

    def of_role(self, role: str) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == role)

    def whole(self) -> tuple[Member, ...]:
        """Members that are not cut, and of which nothing says that whole is right."""
        whole = (member for member in self.of_role("whole") if not _says_partial(member.module))
        return tuple(member for member in whole if not (_is_spoken_for(member.module) and self.is_latent(member)))

    def is_latent(self, member: Member) -> bool:
        """Whether a member gives the fused experts all that they take: nobody else takes that many features."""
        width = member.module.info.features[0]
        taken_in_parts = {consumer.module.info.features[1] for consumer in self.of_role("consumer")}
        return width in self.latent and width not in taken_in_parts


def find_groups(resolved: ResolvedPlan, faulty: FaultyRules) -> Iterator[Group]:
    """The groups whose rules are not at fault already."""
    members: dict[str, list[Member]] = {}
    for module in resolved.modules:
        if module.info.kind.is_linear and module.fqn != resolved.inventory.head:
            around = module.block if module.block is not None else next(ancestors(module.fqn), "")
            members.setdefault(around, []).append(_member(module))
    for owner in resolved.modules:
        group = Group(owner, tuple(members.get(owner.fqn, ())), _latent(resolved, owner))
        cut = any(member.role != "whole" for member in group.members)
        if (group.is_block or cut) and not _waits(faulty, group):
            yield group


def stream_width(resolved: ResolvedPlan) -> int | None:
    """Features of the residual stream, as the embedding gives them."""
    embedding = resolved.by_fqn.get(resolved.inventory.embedding or "")
    return embedding.info.parameters[0].shape[-1] if embedding and embedding.info.parameters else None


def _latent(resolved: ResolvedPlan, owner: ResolvedModule) -> frozenset[int]:
    inside = ((module.info.experts, module.info.parameters) for module in resolved.children(owner.fqn))
    taken = {
        parameter.shape[experts.read]
        for experts, parameters in inside
        for parameter in parameters
        if experts is not None and parameter.name in GIVING and len(parameter.shape) == 3
    }
    return frozenset(taken - {stream_width(resolved)})


def _waits(faulty: FaultyRules, group: Group) -> bool:
    """Whether a faulty rule, or a torch style, whose layouts are its own affair, leaves nothing to say."""
    natives = (m.module.style is not None and m.module.style.native is not None for m in group.members)
    return any(natives) or any(faulty.explains(member.module.fqn) for member in group.members)


def _member(module: ResolvedModule) -> Member:
    taken, given, split = input_conversion(module), output_conversion(module), module.style and module.style.split
    inside = {Split.INPUT: (FEATURES, PARTIAL), Split.OUTPUT: (REPLICATE, FEATURES)}
    takes, gives = inside.get(split, (REPLICATE, REPLICATE)) if split else (REPLICATE, REPLICATE)
    return Member(module, taken.source if taken else takes, given.target if given else gives)


def _is_spoken_for(module: ResolvedModule) -> bool:
    """Whether rules decide about all of its parameters: inside a block their gradients are then summed."""
    return all(parameter.claim is not None for parameter in module.parameters)


def _says_partial(module: ResolvedModule) -> bool:
    """A whole linear that its rule declares to see a part of the work: a router, a latent projection."""
    return all(p.style is not None and p.style.gradient is Gradient.PARTIAL for p in module.parameters)
