"""Which layers a plan treats differently: the small model of a proof keeps one of each kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardplan.inventory import Inventory, ancestors
from shardplan.resolved import ResolvedPlan

Said = tuple[str, ...]  # what some line of the plan says of a part of a layer


def layers_told_apart(resolved: ResolvedPlan, layers: int) -> int:
    """How many of the first layers it takes to have one of every kind that the plan makes of them.

    Args:
        resolved: the plan, for the model at its real size.
        layers: how many there are; lists of as many modules are taken for them.
    """
    by_list: defaultdict[str, defaultdict[int, set[Said]]] = defaultdict(lambda: defaultdict(set))
    sizes = {fqn: len(members) for fqn, members in resolved.inventory.children.items()}
    for name, line in _lines(resolved):
        for around in (name, *ancestors(name)):
            parent, _, index = around.rpartition(".")
            if index.isdigit() and sizes.get(parent) == layers and _is_list(resolved.inventory, parent):
                by_list[parent][int(index)].add((name.removeprefix(around), line))
    needed = 0
    for said in by_list.values():
        kinds = [frozenset(said[index]) for index in range(layers)]
        needed = max(needed, 1 + max(kinds.index(kind) for kind in set(kinds)))
    return needed


def _is_list(inventory: Inventory, fqn: str) -> bool:
    return inventory.by_fqn[fqn].container


def _lines(resolved: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Names of modules, each with something that decides about it."""
    for module in resolved.modules:
        if module.rule is not None:
            yield module.fqn, f"rule {id(module.rule)}"
        for parameter in module.parameters:
            if parameter.claim is not None:
                yield module.fqn, f"claim {parameter.info.name} {id(parameter.claim)}"
    for kind, matches in (("unit", resolved.units), ("recompute", resolved.recompute)):
        for matched in matches:
            yield from ((fqn, f"{kind} {id(matched.line)}") for fqn in matched.fqns)
