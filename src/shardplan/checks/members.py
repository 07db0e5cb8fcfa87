"""Checks that what works together is cut together: the linears of a block, or siblings without one."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.groups import FEATURES, Group, Member, stream_width
from shardplan.checks.names import general
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic
from shardplan.plan import Rule
from shardplan.residual import output_conversion
from shardplan.styles import Split

_ORDER = "colwise linears, then a rowwise one"
_ALIKE = "make all of them colwise"

# Linears that read one activation and go into one computation: they are cut alike.
_SIBLINGS = (
    {"q_proj", "k_proj", "v_proj"},
    {"wq", "wk", "wv"},
    {"query", "key", "value"},
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
)


# ---------------------------------------------------------------- SP203


def check_members(target: Target) -> Iterator[Diagnostic]:
    """SP203: between two edges every linear is cut, and what some produce in parts, others take in parts."""
    for group in target.groups:
        yield from _incomplete(target, group) or _disordered(target, group)


def left_whole(target: Target) -> frozenset[str]:
    """The linears that `check_members` reports as whole."""
    return frozenset(member.module.fqn for group in target.groups for member in group.whole())


def _incomplete(target: Target, group: Group) -> list[Diagnostic]:
    whole, producers, consumers = group.whole(), group.of_role("producer"), group.of_role("consumer")
    if whole:
        verb = "stays" if len(whole) == 1 else "stay"
        message = f"{_names(whole)} {verb} whole in {group.name}, where {_roles(producers, consumers)}"
        expected = f"every linear of {group.name} is cut"
        return [_fault(target, group, message, expected, _remedy(group, whole), (*whole, *producers, *consumers))]
    if not consumers and _ends_in_parts(group) and (producers or not _holds_shards(target, group)):
        given = _names(producers) or "its members"
        message = f"{group.name} has no rowwise linear to add up what {given} give in parts"
        return [_fault(target, group, message, _ORDER, _last_hint(target, group), (*producers, *group.members))]
    if consumers and not producers:
        message = f"{group.name} has no colwise linear to give {_names(consumers)} the parts that it takes"
        hint = f"make the linears before {consumers[0].name} colwise"
        return [_fault(target, group, message, _ORDER, hint, (*consumers, *group.members))]
    return []


def _holds_shards(target: Target, group: Group) -> bool:
    """Whether parameters that are cut by number, those of fused experts, give the parts that the block adds up."""
    inside = target.resolved.children(group.owner.fqn)
    return any(p.style is not None and p.style.split is Split.DIM for m in inside for p in m.parameters)


def _ends_in_parts(group: Group) -> bool:
    """Whether somebody has to add up: behind a block, unless its output edge takes the features as they are."""
    given = output_conversion(group.owner)
    return not (group.is_block and given and given.source == FEATURES)


def _roles(producers: tuple[Member, ...], consumers: tuple[Member, ...]) -> str:
    parts = [f"{_names(part)} {'is' if len(part) == 1 else 'are'} {style}"
             for part, style in ((producers, "colwise"), (consumers, "rowwise")) if part]  # fmt: skip
    return listed(parts) if parts else "nothing else is cut"


def _remedy(group: Group, whole: tuple[Member, ...]) -> str:
    producers, consumers = group.of_role("producer"), group.of_role("consumer")
    names = _names(whole)
    if not producers and not consumers:
        return f"give {names} styles, or take {group.name} out of its rule"
    missing, given = {member.name for member in whole}, {member.name for member in producers}
    are_siblings = any(missing <= siblings and given & siblings for siblings in _SIBLINGS)
    if consumers and (not producers or are_siblings):
        verb = "it gives" if len(whole) == 1 else "they give"
        return f"make {names} colwise: {_names(consumers)} takes in parts what {verb}"
    if not consumers and whole[-1] is group.members[-1]:
        return f"make {whole[-1].name} rowwise: it takes what {_names(producers)} give in parts"
    return f"make {names} colwise where it reads the input of {group.name}, rowwise where it reads what was cut"


def _last_hint(target: Target, group: Group) -> str:
    if not group.members:
        of_hf = group.owner.rule is not None and group.owner.rule.of_hf
        mend = f"write `{target.spell(general(group.owner.fqn))}: null`" if of_hf else "remove its rule"
        return f"it holds no linear: {mend}"
    return f"make {group.members[-1].name}, its last linear, rowwise"


def _disordered(target: Target, group: Group) -> list[Diagnostic]:
    """Members whose roles are mixed up."""
    return _odd_sibling(target, group) or _cut_latent(target, group) or _rowwise_inside(target, group)


def _odd_sibling(target: Target, group: Group) -> list[Diagnostic]:
    """Siblings that are cut differently."""
    roles = {member.name: member for member in group.members}
    for siblings in _SIBLINGS:
        members = [roles[name] for name in roles if name in siblings]
        odd = [member for member in members if member.role != members[0].role]
        if odd:
            first, other = members[0], odd[0]
            message = (
                f"{other.name} is {_style(other)} in {group.name}, but its sibling {first.name} is {_style(first)}"
            )
            return [_fault(target, group, message, f"{_names(tuple(members))} cut alike", _ALIKE, (other, *members))]
    return []


def _cut_latent(target: Target, group: Group) -> list[Diagnostic]:
    """A linear that gives each rank a part of what the experts take whole, or is cut behind them."""
    for producer in group.of_role("producer"):
        if group.is_latent(producer):
            message = f"{producer.name} is colwise, but the experts of {group.name} take all the features that it gives"
            hint = f"make {producer.name} replicated_with_grad_allreduce"
            return [_fault(target, group, message, "a linear of which each rank has all features", hint, (producer,))]
    in_parts = {producer.module.info.features[0] for producer in group.of_role("producer")}
    for member in (*group.of_role("producer"), *group.of_role("consumer")):
        gives, takes = member.module.info.features
        if takes in group.latent - in_parts and gives == stream_width(target.resolved):
            message = f"{member.name} is {_style(member)}, but it takes the sum that the experts of {group.name} give"
            hint = f"make {member.name} replicated_behind_parts"
            return [_fault(target, group, message, "a linear of which each rank has all features", hint, (member,))]
    return []


def _rowwise_inside(target: Target, group: Group) -> list[Diagnostic]:
    """A row-wise linear whose features are not the stream's: the block goes on behind it."""
    width = stream_width(target.resolved)
    ends = [consumer for consumer in group.of_role("consumer") if not consumer.module.part]
    for consumer in ends if group.is_block and width else ():
        given = consumer.module.info.features[0]
        if given != width:
            message = (
                f"{consumer.name} is rowwise and gives {given} features, but {group.name} gives the stream {width}"
            )
            return [_fault(target, group, message, _ORDER, f"make {consumer.name} colwise", (consumer,))]
    return []


def _fault(target: Target, group: Group, message: str, expected: str, hint: str, at: tuple[Member, ...]) -> Diagnostic:
    """At the rule of one of the members ``at``, best the first, or at that of the group's owner."""
    hint = _narrower(target, group) or hint
    rules = (*map(_rule, at), group.owner.rule)
    message = f"{message}{target.see(*rules)}"
    return Diagnostic("SP203", message, target.where(*rules), general(group.owner.fqn), expected, hint)


def _rule(member: Member) -> Rule | None:
    """The rule that speaks of a member, else the one from above that decides about its parameters."""
    claims = (parameter.claim for parameter in member.module.parameters)
    return member.rule or next((claim for claim in claims if claim is not None), None)


def _narrower(target: Target, group: Group) -> str:
    """What to write in place of a ``**`` that reaches further than it may be meant to."""
    rules = {id(member.rule): member.rule for member in group.members if member.role != "whole" and member.rule}
    for rule in rules.values():
        if any("**" in alternative.tokens for alternative in rule.pattern.alternatives):
            matched = next(entry.fqns for entry in target.resolved.rules if entry.line is rule)
            inside = f"{general(group.owner.fqn)}."
            others = dict.fromkeys(name for name in map(general, matched) if not name.startswith(inside))
            if others:
                return f"if {rule.pattern} is not meant to reach {inside[:-1]}, write {listed(list(others)[:4])}"
    return ""


def _style(member: Member) -> str:
    return {"producer": "colwise", "consumer": "rowwise", "whole": "whole"}[member.role]


def _names(members: tuple[Member, ...]) -> str:
    return listed([member.name for member in members]) if members else ""
