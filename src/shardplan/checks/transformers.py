"""Checks of what transformers' own plan comes to for a model: known to be wrong, or little."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.names import general
from shardplan.checks.target import Target, count, few, listed
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.hf.known import KNOWN_WRONG
from shardplan.hf.structure import language_model
from shardplan.resolved import ResolvedParameter
from shardplan.styles import Split

MUCH = 0.1  # of a model's parameters beside its ends


def check_known_wrong(target: Target) -> Iterator[Diagnostic]:
    """SP106: transformers' own plan for this model is known to come out wrong."""
    model = target.resolved.inventory.architectures[0]
    wrong = KNOWN_WRONG.get(model) if target.mesh.has_tp and any(of_hf(target)) else None
    if wrong is not None and (target.sequence_parallel or not wrong.on_cut_stream_alone):
        mode = " under sequence parallelism" if wrong.on_cut_stream_alone else ""
        instead = "turn sequence parallelism off" if wrong.on_cut_stream_alone else "write a plan of your own"
        yield Diagnostic(
            "SP106",
            f"transformers' own plan for {model}, completed, is wrong{mode}: {wrong.reason}",
            where=target.resolved.plan.where,
            subject=model,
            expected="a model for which it is proven (docs/coverage.md)",
            hint=instead,
        )


def check_left_by_transformers(target: Target) -> Iterator[Diagnostic]:
    """SP211: what transformers' own plan says nothing of stays whole, and that may be most of the model.

    Of the language model: what stands beside it stays whole on purpose, and `check_towers` says so.
    """
    resolved, ends = target.resolved, (target.resolved.inventory.embedding, target.resolved.inventory.head)
    if not target.mesh.has_tp:
        return
    inside = [m for m in resolved.modules if m.fqn.startswith(language_model(resolved.inventory)) and m.fqn not in ends]
    body = [parameter for module in inside for parameter in module.parameters]
    whole = [p for p in body if p.claim and p.claim.of_hf and p.style and p.style.split is Split.NONE]
    share = sum(p.info.numel for p in whole) / max(sum(p.info.numel for p in body), 1)
    if share > MUCH:
        largest = sorted(whole, key=lambda p: -p.info.numel)
        names = list(dict.fromkeys(general(parameter.info.fqn) for parameter in largest))
        yield Diagnostic(
            "SP211",
            f"{100 * share:.0f} % of {resolved.inventory.architectures[0]} beside its ends stay whole over tp: "
            f"transformers' own plan does not say how to cut {listed(names[:3])}",
            where=resolved.plan.where,
            subject=names[0],
            expected="rules for what is large",
            hint="start from `plan-compile --init` and add them",
            severity=Severity.WARNING,
        )


def check_unmatched(target: Target) -> Iterator[Diagnostic]:
    """SP102: many of transformers' own plans name what a model of the family may have, and this one has not.

    A note, since nobody can mend a plan that comes with transformers.
    """
    model, keys = target.resolved.inventory.architectures[0], target.resolved.plan.unmatched
    if not keys or target.resolved.plan.filled:
        return
    yield Diagnostic(
        "SP102",
        f"{count(len(keys), 'key')} of transformers' own plan for {model} {'match' if len(keys) > 1 else 'matches'} "
        f"nothing in it: {few(keys)}",
        where=target.resolved.plan.where,
        subject=keys[0],
        hint="nothing to do where the model has no such module",
        severity=Severity.NOTE,
    )


def of_hf(target: Target) -> Iterator[ResolvedParameter]:
    """The parameters about which transformers' plan, completed, decides."""
    parameters = (p for module in target.resolved.modules for p in module.parameters)
    yield from (p for p in parameters if p.claim is not None and p.claim.of_hf)
