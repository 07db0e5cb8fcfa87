"""Checks of parameters beside the cut linears: those that cover what each rank has only a part of."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.groups import Group
from shardplan.checks.names import general
from shardplan.checks.target import Target
from shardplan.diagnostics import Diagnostic
from shardplan.inventory import HeadInfo, ParameterInfo
from shardplan.resolve import ResolvedModule, ResolvedParameter
from shardplan.styles import Kind, Split


def check_side_parameters(target: Target) -> Iterator[Diagnostic]:
    """SP208: a whole parameter with an entry for every head, or every cut feature, of which a rank has only some.

    A norm over one head's features is the same for all heads; one over the whole projection width is not.
    """
    if not target.mesh.has_tp:
        return
    for group in target.groups:
        widths = {member.module.info.features[0]: member.name for member in group.of_role("producer")}
        for module in _beside(target, group):
            for parameter in module.parameters:
                covered = _covered(parameter.info, group.owner, module, widths)
                if covered and not _is_cut(parameter):
                    yield _fault(target, parameter, covered)


def _beside(target: Target, group: Group) -> Iterator[ResolvedModule]:
    """The owner of a group and the modules below it that are not linears."""
    prefix = f"{group.owner.fqn}." if group.owner.fqn else ""
    yield group.owner
    for module in target.resolved.children(group.owner.fqn) if group.is_block else ():
        if module.info.kind is Kind.OTHER:
            yield module
    if not group.is_block and prefix:
        own = (m for m in target.resolved.modules if m.fqn.startswith(prefix) and m.info.kind is Kind.OTHER)
        yield from own


def _covered(
    parameter: ParameterInfo, owner: ResolvedModule, module: ResolvedModule, widths: dict[int, str]
) -> str | None:
    """What a parameter has an entry for, in words; None where it is the same for every rank."""
    heads = owner.info.attention
    for length in parameter.shape:
        if length in widths and (heads is None or length != heads.head_dim):
            return f"every feature that {widths[length]} gives"
    if heads and parameter.shape and _counts_heads(parameter.shape, heads, of_owner=module is owner):
        return "every head"
    return None


def _counts_heads(shape: tuple[int, ...], heads: HeadInfo, *, of_owner: bool) -> bool:
    """A first dim of as many entries as heads; one dim alone may be a head's features, unless attention owns it."""
    if shape[0] not in (heads.heads, heads.kv_heads) or shape[0] == 1:
        return False
    return len(shape) > 1 or of_owner or shape[0] != heads.head_dim


def _is_cut(parameter: ResolvedParameter) -> bool:
    style = parameter.style
    return style is not None and (style.split is not Split.NONE or style.native is not None)


def _fault(target: Target, parameter: ResolvedParameter, covered: str) -> Diagnostic:
    name = general(parameter.info.fqn)
    return Diagnostic(
        "SP208",
        f"{name} has an entry for {covered}, of which each rank has a part, and it is not cut along with them",
        where=target.where(parameter.claim),
        subject=name,
        expected="a parameter that is the same for every head",
        hint="no style cuts such a parameter yet: replicate the whole module with null, without a block around it",
    )
