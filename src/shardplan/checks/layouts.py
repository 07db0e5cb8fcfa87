"""Checks of edges: each conversion starts from what is there, ends in what is wanted next, and runs once."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.groups import FEATURES, Group, Member
from shardplan.checks.names import general, last
from shardplan.checks.stream import begins_or_ends_wrongly
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.edges import Edge, UnsupportedConversionError, lower_edge
from shardplan.inventory import ancestors
from shardplan.layouts import REPLICATE, STREAM, Conversion, Layout
from shardplan.plan import Rule
from shardplan.residual import input_conversion, output_conversion
from shardplan.resolved import ResolvedModule
from shardplan.styles import Gradient, Split


def check_conversions(target: Target) -> Iterator[Diagnostic]:
    """SP204: a conversion has a collective, and one end of it is the layout that the module's style computes on."""
    reported = begins_or_ends_wrongly(target) | {
        member.fqn for _, _, members in _repeated(target) for member in members
    }
    for module in target.resolved.modules:
        for side, conversion in _edges(module):
            try:
                _lowered(module, conversion)
            except UnsupportedConversionError as unsupported:
                yield fault(target, module, f"{side} of {general(module.fqn)}: {unsupported}")
                continue
            if module.fqn in reported:
                continue
            inner, own = _inner_end(module, side, conversion)
            if own is None and not _opens_block(module) and inner.kind not in ("replicate", "stream"):
                message = f"nothing in {general(module.fqn)} is {inner}, but its rule says {side}: {conversion}"
                yield fault(target, module, message, f"{side} between replicate and stream")
            elif own is not None and not _same(target, inner, own):
                style = module.style.name if module.style else ""
                verb = "computes on" if side == "input" else "gives"
                message = f"{style} {verb} {own}, but the rule for {general(module.fqn)} says {side}: {conversion}"
                yield fault(target, module, message, _corrected(side, conversion, own))


def _inner_end(module: ResolvedModule, side: str, conversion: Conversion) -> tuple[Layout, Layout | None]:
    """The end of a conversion that faces the module, and what its style has there; None where it does not care."""
    own = getattr(module.style, side) if module.style is not None else None
    if _opens_block(module) and side == "output":
        own = None  # `check_groups` knows what the members give
    if side == "input":
        return conversion.target, own.target if own else None
    return conversion.source, own.source if own else None


def _corrected(side: str, conversion: Conversion, own: Layout) -> str:
    right = Conversion(conversion.source, own) if side == "input" else Conversion(own, conversion.target)
    return f"{side}: {right}"


def check_groups(target: Target) -> Iterator[Diagnostic]:
    """SP204: inside a block nothing is converted twice, and its members give what its output edge starts from."""
    for group, side, members in _repeated(target):
        names = listed(dict.fromkeys(last(member.fqn) for member in members))
        message = f"the rule for {names} converts the {side} inside {group.name}, which does so at its edge"
        expected, hint = "conversions at the edges of the block alone", f"remove `{side}`"
        yield fault(target, members[0], message, expected, hint, also=(group.owner.rule,))
    for group in target.groups:
        if group.is_block:
            yield from _end(target, group)


def _repeated(target: Target) -> Iterator[tuple[Group, str, list[ResolvedModule]]]:
    """The sides on which modules inside a block convert, with the modules of one rule together."""
    for group in target.groups:
        if group.is_block:
            yield from ((group, side, members) for (side, _), members in _inside(target, group).items())


def _inside(target: Target, group: Group) -> dict[tuple[str, int], list[ResolvedModule]]:
    ends = output_conversion(group.owner)
    repeated: dict[tuple[str, int], list[ResolvedModule]] = {}
    for member in target.resolved.children(group.owner.fqn):
        taken, given = input_conversion(member), output_conversion(member)
        takes_features = taken is not None and taken.source == FEATURES and member.info.kind.is_linear
        if taken and not takes_features and _converts(target, member, taken):
            repeated.setdefault(("input", id(member.rule)), []).append(member)
        if given and _converts(target, member, given) and not (ends and given.target == ends.source == REPLICATE):
            repeated.setdefault(("output", id(member.rule)), []).append(member)
    return repeated


def _end(target: Target, group: Group) -> Iterator[Diagnostic]:
    given = output_conversion(group.owner)
    for consumer in group.of_role("consumer"):
        if given and consumer.gives != given.source and not _stated(consumer):
            message = f"{group.name} ends in {consumer.name}, which gives {consumer.gives}, but its output says {given}"
            expected = f"output: {Conversion(consumer.gives, given.target)}"
            yield fault(target, group.owner, message, expected, also=(consumer.rule,))


def _stated(member: Member) -> bool:
    """Whether `_inside` speaks about the output already."""
    return member.module.stated["output"] is not None


def check_places(target: Target) -> Iterator[Diagnostic]:
    """SP204: outside blocks every module takes the layout that is there, and gives the one that the next one takes.

    Modules that another check of edges reports are left to it.
    """
    reported = begins_or_ends_wrongly(target) | {finding.subject for finding in check_conversions(target)}
    grouped = {m.module.fqn: (group, m) for group in target.groups if not group.is_block for m in group.members}
    lonely: dict[str, list[tuple[Group, Member]]] = {}
    for module in target.resolved.modules:
        if not reported.isdisjoint((module.fqn, general(module.fqn))):
            continue
        if module.rule is None or module.block is not None or target.explained(module.fqn):
            continue
        if module.info.kind.is_linear and _cut_features(module) and module.fqn != target.resolved.inventory.head:
            if module.fqn not in grouped:
                if not _group_is_at_fault(target, module):
                    yield from (fault(target, module, text, wanted) for text, wanted in _misplaced(target, module))
                continue
            group, member = grouped[module.fqn]
            if _misplaced(target, module, skip=(member.takes == FEATURES, member.gives == FEATURES)):
                lonely.setdefault(general(group.owner.fqn), []).append((group, member))
            continue
        for message, expected in (*_misplaced(target, module), *_converts_around_blocks(target, module)):
            yield fault(target, module, message, expected)
    for name, entries in lonely.items():
        members = list(dict.fromkeys(member.name for _, member in entries))
        yield fault(
            target,
            entries[0][1].module,
            f"{listed(members)} of {name} meet the cut residual stream, and no block gathers and cuts it around them",
            "stream -> replicate before them, partial -> stream behind",
            f"add `{target.spell(name)}: block`",
            also=(*(member.rule for _, member in entries), entries[0][0].owner.rule),
        )


def _converts_around_blocks(target: Target, module: ResolvedModule) -> list[tuple[str, str]]:
    """A layer may not gather the stream for blocks inside it, which gather for themselves."""
    if _opens_block(module) or module.fqn not in target.stream.around_blocks or not target.stream.carries(module.fqn):
        return []
    taken, given = input_conversion(module), output_conversion(module)
    inner = [end for end in (taken.target if taken else None, given.source if given else None) if end]
    message = f"{general(module.fqn)} converts the stream around blocks that convert it themselves"
    return [(message, "the stream inside it")] if any(not _same(target, end, STREAM) for end in inner) else []


def _group_is_at_fault(target: Target, module: ResolvedModule) -> bool:
    """Whether a sibling's rule is at fault, so that nothing is known yet of what they exchange."""
    around = next(ancestors(module.fqn), "")
    siblings = (m.fqn for m in target.resolved.modules if m.fqn and next(ancestors(m.fqn)) == around)
    return any(target.explained(fqn) for fqn in siblings)


def _misplaced(
    target: Target, module: ResolvedModule, skip: tuple[bool, bool] = (False, False)
) -> list[tuple[str, str]]:
    """What is wrong at a module's outer ends, with what was expected; ``skip`` leaves out its input, its output."""
    name = general(module.fqn)
    found: list[tuple[str, str]] = []
    taken, given = input_conversion(module), output_conversion(module)
    before, behind = _around(target, module)
    if taken and not skip[0] and not _same(target, taken.source, before):
        found.append((f"takes {taken.source}, but finds {_meaning(target, before)}", f"input: {before} -> ..."))
    if given and not skip[1] and not any(_same(target, given.target, layout) for layout in behind):
        expected = " or ".join(f"output: ... -> {layout}" for layout in behind)
        found.append((f"gives {given.target} where {_meaning(target, behind[0])} is wanted", expected))
    messages, expectations = zip(*found, strict=True) if found else ((), ())
    return [(f"{name} {', and '.join(messages)}", ", ".join(expectations))] if found else []


def _around(target: Target, module: ResolvedModule) -> tuple[Layout, tuple[Layout, ...]]:
    """What a module finds, and what it may leave behind."""
    stream, inventory = target.stream, target.resolved.inventory
    if module.fqn == inventory.head:
        return REPLICATE, (REPLICATE, FEATURES)
    if module in stream.cuts:
        return REPLICATE, (STREAM,)
    if stream.carries(module.fqn):
        return STREAM, (STREAM,)
    if module in stream.gathers:
        return STREAM, (REPLICATE,)
    if module.fqn == inventory.embedding:
        return REPLICATE, (REPLICATE, STREAM)
    if module.style is not None and module.style.gradient is Gradient.STREAM and not module.stated["output"]:
        return STREAM, (STREAM,)  # `check_gradients` says where that is wrong
    return REPLICATE, (REPLICATE,)


def _same(target: Target, one: Layout, other: Layout) -> bool:
    return one.resolved(target.sequence_parallel) == other.resolved(target.sequence_parallel)


def _meaning(target: Target, layout: Layout) -> str:
    return f"the stream ({layout.resolved(target.sequence_parallel)})" if layout == STREAM else str(layout)


def _cut_features(module: ResolvedModule) -> bool:
    return module.style is not None and module.style.split is not Split.NONE


def check_repeats(target: Target) -> Iterator[Diagnostic]:
    """SP207: siblings outside a block that each send one activation again: right, but several times the traffic."""
    for group in target.groups:
        if group.is_block or group.whole():
            continue
        repeated: dict[Conversion, list[Member]] = {}
        for member in group.members:
            taken = input_conversion(member.module)
            found = taken is not None and _same(target, taken.source, _around(target, member.module)[0])
            if taken and found and taken.source != FEATURES and _sends(target, member.module, taken):
                repeated.setdefault(taken, []).append(member)
        for conversion, members in repeated.items():
            if len(members) > 1:
                rules = (*(member.rule for member in members), group.owner.rule)
                yield Diagnostic(
                    "SP207",
                    f"{listed([m.name for m in members])} of {group.name} each convert one input, {conversion}, "
                    f"which sends it {len(members)} times{target.see(*rules)}",
                    where=target.where(*rules),
                    subject=group.name,
                    expected="one conversion for all of them",
                    hint=f"add `{target.spell(group.name)}: block`",
                    severity=Severity.WARNING,
                )


# ---------------------------------------------------------------- small questions


def _edges(module: ResolvedModule) -> Iterator[tuple[str, Conversion]]:
    for side, conversion in (("input", input_conversion(module)), ("output", output_conversion(module))):
        if conversion is not None:
            yield side, conversion


def _lowered(module: ResolvedModule, conversion: Conversion) -> Edge:
    return lower_edge(conversion, read_in_parts=module.style is not None and module.style.reads_in_parts)


def _opens_block(module: ResolvedModule) -> bool:
    return module.style is not None and module.style.opens_block


def _converts(target: Target, module: ResolvedModule, conversion: Conversion) -> bool:
    try:
        return _lowered(module, conversion).in_mode(target.sequence_parallel) is not None
    except UnsupportedConversionError:
        return False  # reported by `check_conversions`


def _sends(target: Target, module: ResolvedModule, conversion: Conversion) -> bool:
    try:
        collective = _lowered(module, conversion).in_mode(target.sequence_parallel)
    except UnsupportedConversionError:
        return False
    return collective is not None and bool(collective.sends)


def fault(
    target: Target,
    module: ResolvedModule,
    message: str,
    expected: str = "",
    hint: str = "",
    also: tuple[Rule | None, ...] = (),
) -> Diagnostic:
    """A finding about an edge, at the rule of its module or at another one that makes the fault with it."""
    rules = (module.rule, *also)
    message = f"{message}{target.see(*rules)}"
    severity = Severity.WARNING if _only_stated(target, module) else Severity.ERROR
    return Diagnostic("SP204", message, target.where(*rules), general(module.fqn), expected, hint, severity)


def _only_stated(target: Target, module: ResolvedModule) -> bool:
    """Whether the output of position tables, which takes part in no layout, is named otherwise but not converted."""
    given = output_conversion(module)
    if module.style is None or not module.style.positions:
        return False
    try:
        return given is None or _lowered(module, given).in_mode(target.sequence_parallel) is None
    except UnsupportedConversionError:
        return False
