"""What ran against what the compiled plan says: the same collectives, at the same modules, in the same direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from shardplan.checks.names import general
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Diagnostic, Location
from shardplan.dry_run.calls import Call, Purpose
from shardplan.inventory import ancestors
from shardplan.resolved import ResolvedPlan

Key = tuple[str, str, Purpose, str]  # module, direction, purpose, collective
OVER_TP = (Purpose.EDGE, Purpose.SUM)


def differences(calls: Iterable[Call], compiled: CompiledPlan, resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    """SP402 for each kind of module at which a step sends otherwise than the plan says."""
    ran, said = ran_over_tp(calls, compiled), listed(compiled)
    frozen = not all(parameter.trainable for parameter in resolved.inventory.parameters)
    kinds: dict[Key, list[Key]] = {}
    for key in dict.fromkeys([*said, *ran]):
        # A frozen part of the model has no backward; what it would send there is not missed.
        spared = frozen and key[1] == "backward" and ran[key] < said[key]
        if ran[key] != said[key] and not spared:
            kinds.setdefault((general(key[0]), *key[1:]), []).append(key)
    for kind, keys in sorted(kinds.items(), key=lambda entry: entry[0][1] == "backward"):  # forward first
        yield _difference(kind, sum(ran[key] for key in keys), sum(said[key] for key in keys), keys[0], resolved)


def listed(compiled: CompiledPlan) -> Counter[Key]:
    """What one step sends over tp, by the compiled plan."""
    said: Counter[Key] = Counter()
    for module, direction, name in compiled.collectives():
        said[module.fqn, direction, Purpose.EDGE, name] += 1
    for unit in compiled.coalesced_sums():
        said[unit, "backward", Purpose.SUM, "all_reduce"] += 1
    if compiled.mesh.has_tp and compiled.head is not None and compiled.head.gathered:
        said[compiled.head.fqn, "forward", Purpose.EDGE, "all_gather"] += 1
    return said


def ran_over_tp(calls: Iterable[Call], compiled: CompiledPlan) -> Counter[Key]:
    """What a step sent over tp, without recomputation and without modules that a torch style has taken over."""
    native = {module.fqn for module in compiled.modules if module.native is not None}
    return Counter(
        (call.module, call.direction, call.purpose, call.name)
        for call in calls
        if call.purpose in OVER_TP
        and call.direction != "recomputation"
        and native.isdisjoint((call.module, *ancestors(call.module)))
    )


def governing(resolved: ResolvedPlan, module: str) -> Location | None:
    """The rule that speaks about ``module``, or else about the nearest around it; of the head for what is no module."""
    if module not in resolved.by_fqn:
        module = resolved.head.fqn if resolved.head else ""
    rule = resolved.governing(module)
    return rule.where if rule else resolved.plan.where


def _difference(kind: Key, ran: int, said: int, first: Key, resolved: ResolvedPlan) -> Diagnostic:
    module, direction, purpose, name = kind
    what = f"the gradients of {module or 'the model'}" if purpose is Purpose.SUM else module or "the model"
    times = f"{ran} times" if ran != said else f"{ran} times, but at other layers"
    return Diagnostic(
        "SP402",
        f"one step runs {name} for {what} in the {direction} {times}; the compiled plan says {said}",
        where=governing(resolved, first[0]),
        subject=module,
        expected="each module at whose edge something is sent to run once in a step",
        hint="look at how often, and from where, the model calls it",
    )
