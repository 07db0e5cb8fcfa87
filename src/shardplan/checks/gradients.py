"""Checks that every parameter's gradient is right where it stands, and that tied parameters are one."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.groups import Group
from shardplan.checks.kinds import in_a_mixer, mixes_tokens
from shardplan.checks.members import left_whole
from shardplan.checks.names import general
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic, Location, Severity
from shardplan.inventory import ancestors
from shardplan.lower import is_added_once, split_dim
from shardplan.plan import Rule
from shardplan.resolved import ResolvedModule
from shardplan.styles import Gradient, Kind, Split, Style


def check_gradients(target: Target) -> Iterator[Diagnostic]:
    """SP206: a replicated parameter's gradient is summed exactly where each rank sees only a part of the work."""
    between = {group.owner.fqn: group for group in target.groups if not group.is_block}
    whole = left_whole(target)
    faults: dict[tuple[Location, str, str, str, Severity], list[str]] = {}
    for module in target.resolved.modules:
        for parameter in module.parameters:
            style, rule = parameter.style, parameter.claim
            if style is None or rule is None or style.split is not Split.NONE or style.native is not None:
                continue
            if module.fqn in whole or target.explained(parameter.info.fqn) or is_added_once(parameter, module):
                continue
            groups = [between[fqn] for fqn in (module.fqn, *ancestors(module.fqn)) if fqn in between]
            fault = _fault(target, module, style, in_parts=bool(groups))
            if fault:
                rules = (rule, *_around(target, module, groups))
                # Inside a block gradients are added up whatever the style says of them.
                severity = Severity.WARNING if module.inside is not None else Severity.ERROR
                key = (target.where(*rules), target.see(*rules), *fault, severity)
                faults.setdefault(key, []).append(general(parameter.info.fqn))
    for (where, see, reason, hint, severity), names in faults.items():
        names = list(dict.fromkeys(names))
        plural, verb = ("s", "are") if len(names) > 1 else ("", "is")
        said = f"{verb} summed all the same" if severity is Severity.WARNING else "would be wrong"
        yield Diagnostic(
            "SP206",
            f"the gradient{plural} of {listed(names)} {said}: {reason}{see}",
            where=where,
            subject=", ".join(names),
            expected="a style that says what the gradient is there",
            hint=hint,
            severity=severity,
        )


def _around(target: Target, module: ResolvedModule, groups: list[Group]) -> Iterator[Rule | None]:
    """The rules that make a module's place what it is: of its block, or of the cut linears that it stands between."""
    yield module.rule
    if module.inside is not None:
        yield target.resolved.by_fqn[module.inside].rule
    for group in groups:
        yield group.owner.rule
        yield from (member.rule for member in group.members)


def _fault(target: Target, module: ResolvedModule, style: Style, *, in_parts: bool) -> tuple[str, str] | None:
    """What is wrong with the gradient that ``style`` declares where the module stands, and what to do."""
    if module.inside is not None:
        if style.gradient is Gradient.STREAM:
            return (
                f"{style.name} stands inside block {general(module.inside)}, off the residual stream",
                "use replicated_with_grad_allreduce: inside a block each rank sees its part of the work only",
            )
        return None
    if in_parts:
        if style.gradient is Gradient.PARTIAL:
            return None
        return (
            "between linears that are cut, each rank sees its part of the work only, and "
            f"{_named(style)} does not sum that",
            f"use replicated_with_grad_allreduce, or make {general(next(ancestors(module.fqn), ''))} a block",
        )
    whole = module.fqn in target.stream.regions
    on_stream = (target.stream.carries(module.fqn) and not whole) or module in target.stream.gathers
    if style.gradient is Gradient.PARTIAL:
        return (
            f"each rank has the whole of it there, and {_named(style)} adds them up",
            "use sequence_parallel" if on_stream else "use null",
        )
    ends = target.sequence_parallel and bool(target.stream.gathers)
    if style.gradient is Gradient.STREAM and not (on_stream or _beside_the_layers(target, module)) and ends:
        return f"{style.name} stands where the residual stream does not run", "use null: its gradient is complete there"
    if on_stream and target.sequence_parallel and style.gradient is Gradient.COMPLETE:
        return (
            f"{_named(style)} runs on the cut residual stream, where each rank sees its part of the sequence only",
            _on_the_stream(target, module),
        )
    return None


def _beside_the_layers(target: Target, module: ResolvedModule) -> bool:
    """Whether the decoder may run a module on the cut stream outside its layers: only behind them, but for a table of
    positions, which is read before; anywhere where the embedding's output is cut already."""
    stream = target.stream
    if stream.decoder is None or not module.fqn.startswith(f"{stream.decoder}."):
        return False
    behind = module.info.kind is not Kind.EMBEDDING and all(
        target.order[layer.fqn] < target.order[module.fqn]
        for layer in target.resolved.modules
        if stream.carries(layer.fqn)
    )
    return behind or stream.cut_by_embedding


def _on_the_stream(target: Target, module: ResolvedModule) -> str:
    if mixes_tokens(target, module):
        return "make it a block"
    parent = next(ancestors(module.fqn), "")
    return f"make {general(parent)} a block" if in_a_mixer(target, module) else "use sequence_parallel"


def _named(style: Style) -> str:
    return f"style {style.name}"


# ---------------------------------------------------------------- SP205


def check_ties(target: Target) -> Iterator[Diagnostic]:
    """SP205: tied parameters are one parameter, so their rules place them alike."""
    for group in target.resolved.inventory.ties:
        placements: dict[str, tuple[str, Rule | None]] = {}
        for parameter in group:
            module = target.resolved.by_fqn[next(ancestors(parameter.fqn))]
            resolved = next(p for p in module.parameters if p.info.fqn == parameter.fqn)
            dim = split_dim(resolved.style, module, parameter.name)
            placements[parameter.fqn] = ("replicate" if dim is None else f"shard({dim})", resolved.claim)
        silent = [rule for _, rule in placements.values() if rule is None]
        if len({placement for placement, _ in placements.values()}) == 1 or len(silent) == len(group):
            continue
        if any(target.explained(parameter.fqn) for parameter in group):
            continue
        rules = [rule for _, rule in placements.values()]
        spoken = [f"{fqn} {place}{'' if rule else ' (no rule)'}" for fqn, (place, rule) in placements.items()]
        yield Diagnostic(
            "SP205",
            f"tied parameters are placed differently: {listed(spoken)}{target.see(*rules)}",
            where=target.where(*rules),
            subject=group[0].fqn,
            expected="one placement under all names, since it is one parameter",
            hint=_hint(target, list(placements)),
        )


def _hint(target: Target, fqns: list[str]) -> str:
    modules = [target.resolved.by_fqn[next(ancestors(fqn))] for fqn in fqns]
    styles = {Kind.EMBEDDING: "embedding_rowwise", Kind.LINEAR: "colwise", Kind.CONV1D: "colwise"}
    kinds = {module.info.kind for module in modules}
    if Kind.EMBEDDING in kinds and len(kinds) > 1 and kinds <= set(styles):
        rules = [f"`{target.spell(general(m.fqn))}: {styles[m.info.kind]}`" for m in modules]
        return f"{listed(rules)} both cut the vocabulary"
    return "give all of them one style"
