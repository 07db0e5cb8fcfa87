"""Checks that a style of a whole module, such as a Mamba-2 mixer, decides about all that it says it decides about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.checks.names import general
from shardplan.checks.packed import known_lengths
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic
from shardplan.lower import split_dim
from shardplan.resolved import ResolvedModule, ResolvedParameter
from shardplan.styles import Style


def check_parts(target: Target) -> Iterator[Diagnostic]:
    """SP203: what a style says of the parts of a module holds for all of them, rules of their own notwithstanding."""
    for owner in target.resolved.modules:
        for name, part in owner.style.parts if owner.style else ():
            for module, parameter in _named(target, f"{owner.fqn}.{name}"):
                written, due = (_cut(target, module, style, parameter) for style in (parameter.style, part))
                if written == due or target.explained(parameter.info.fqn) or _is_a_member(module, written, due):
                    continue
                rules = (parameter.claim, module.rule, owner.rule)
                block, style = general(owner.fqn), owner.style.name if owner.style else ""
                yield Diagnostic(
                    "SP203",
                    f"{name} is {_said(written)} in block {block}, where {style} has it {_said(due)}"
                    f"{target.see(*rules)}",
                    where=target.where(*rules),
                    subject=f"{block}.{name}",
                    expected=f"every part of {block} cut as {style} cuts it",
                    hint=f"remove this rule, or replicate {block} whole: `{target.spell(block)}: null`",
                )
                break


def check_orphaned_parts(target: Target) -> Iterator[Diagnostic]:
    """SP203: parts that a style cuts belong to a module that it decides about; another rule may have taken that."""
    seen: set[str] = set()
    for owner in target.resolved.modules if target.mesh.has_tp else ():
        block = general(owner.fqn)
        for loser in owner.speakers[1:]:
            style, rule = loser.style, loser.rule
            if style is None or not style.parts or rule is owner.rule or block in seen:
                continue
            below = (m for m in target.resolved.modules if m.fqn.startswith(f"{owner.fqn}."))
            orphans = [general(m.fqn).removeprefix(f"{block}.") for m in below if m.part and m.rule is rule]
            if orphans and not target.explained(owner.fqn):
                seen.add(block)
                rules = (owner.rule, rule)
                yield Diagnostic(
                    "SP203",
                    f"{listed(orphans)} of {block} {'is' if len(orphans) == 1 else 'are'} cut by {style.name}, but "
                    f"another rule decides about {block} itself{target.see(*rules)}",
                    where=target.where(*rules),
                    subject=block,
                    expected=f"{style.name} for the whole of {block}, or for nothing of it",
                    hint=f"take {block} out of this rule, or replicate it whole: `{target.spell(block)}: null`",
                )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Along which dim a parameter is cut, in which sections, and what its module counts in shares."""

    dim: int | None
    lengths: tuple[int, ...]
    counts: tuple[str, ...]


def _named(target: Target, fqn: str) -> Iterator[tuple[ResolvedModule, ResolvedParameter]]:
    """A parameter, or those of a module."""
    for module in target.resolved.modules:
        for parameter in module.parameters:
            if fqn in (module.fqn, parameter.info.fqn):
                yield module, parameter


def _cut(target: Target, module: ResolvedModule, style: Style | None, parameter: ResolvedParameter) -> _Cut:
    dim = split_dim(style, module, parameter.info.name)
    whole = parameter.info.shape[dim] if dim is not None else 0
    lengths = known_lengths(target.resolved.inventory, module, style, whole) if whole else ()
    return _Cut(dim, lengths, style.local_sizes if style else ())


def _is_a_member(module: ResolvedModule, written: _Cut, due: _Cut) -> bool:
    """Whether it is a linear that `check_members` or `check_packed` looks at."""
    return module.info.kind.is_linear and (written.dim != due.dim or not written.lengths)


def _said(cut: _Cut) -> str:
    if cut.dim is None:
        return "whole"
    sections = f" in sections of {' + '.join(map(str, cut.lengths))}" if cut.lengths else " as one"
    return f"cut along dim {cut.dim}{sections}{f', with shares of {listed(cut.counts)}' if cut.counts else ''}"
