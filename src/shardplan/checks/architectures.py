"""Checks that a plan is for this model, and finds its root in it."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.names import general, nearest
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic
from shardplan.load import load_plan
from shardplan.resources import shipped_plans


def check_architectures(target: Target) -> Iterator[Diagnostic]:
    """SP106, SP107: the plan is for this model, and its root is there."""
    plan, inventory = target.resolved.plan, target.resolved.inventory
    if plan.over_hf and not inventory.tp_plan:
        shipped = sorted({name for path in shipped_plans().values() for name in load_plan(path).architectures})
        yield Diagnostic(
            "SP106",
            f"no plan is shipped for {inventory.architectures[0]}, and transformers has none for it",
            where=plan.where,
            subject=inventory.architectures[0],
            expected=f"a model with a tp_plan, or one of {', '.join(shipped)}",
            hint="write a plan, or extend one of a model that is built alike",
        )
    elif plan.architectures and not set(plan.architectures) & set(inventory.architectures):
        yield Diagnostic(
            "SP106",
            f"plan '{plan.name}' is not for {inventory.architectures[0]}",
            where=plan.where,
            subject=inventory.architectures[0],
            expected=f"{listed(plan.architectures, 'or')}, or a class derived from one",
            hint=f"use the plan for {inventory.architectures[0]}, or add this class to `architectures` if it is built "
            "alike",
        )
    elif target.resolved.root is None:
        known = [fqn for fqn in inventory.by_fqn if fqn and general(fqn) == fqn]
        close = [name for root in plan.roots for name in nearest(root, known, limit=1)]
        top = [fqn for fqn in known if "." not in fqn]
        yield Diagnostic(
            "SP107",
            f"{inventory.architectures[0]} has no module {listed(plan.roots, 'or')} for a leading dot to stand for",
            where=plan.where,
            subject=", ".join(plan.roots),
            expected=f"`root` names a module: {listed(close or top, 'or')}",
            hint=f"did you mean `root: {close[0]}`?" if close else "correct `root`",
        )
