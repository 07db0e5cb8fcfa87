"""A plan that the checks have passed, proven by numbers on local processes; or the parameter and the rule at fault."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardplan.checks.names import general
from shardplan.checks.target import Target, count
from shardplan.diagnostics import Diagnostic, PlanError
from shardplan.mesh import SHARDING, TP, MeshSpec
from shardplan.plan import Plan
from shardplan.verify.compare import Deviation, Proof, compare
from shardplan.verify.ranks import Ranks, RanksFailedError
from shardplan.verify.shrink import Change, shrink

SMALL_ENOUGH = 4_000_000  # parameters of a user's own model that is run as it is


@dataclass(frozen=True)
class Subject:
    """What a proof runs: a recipe for a small model, what was made smaller, and the mesh of local processes."""

    build: Callable[[], nn.Module]
    changes: tuple[Change, ...]
    mesh: MeshSpec


def make_subject(
    model: nn.Module, target: Target, processes: int, builder: Callable[[], nn.Module] | None = None
) -> Subject:
    """The small model on which ``target`` is proven: the plan, for ``model`` on its mesh.

    Args:
        model: as large as it is, usually on the meta device.
        target: the plan for it, and the mesh that it is meant for.
        processes: how many there are.
        builder: a function of a module, or another picklable one, that builds ``model``, where there is one. Its model
            is taken as it is, if it is small enough to run.

    Raises:
        PlanError: SP903, the model cannot be made small.
    """
    small = small_mesh(target.mesh, processes)
    if builder is not None and sum(parameter.numel() for parameter in model.parameters()) <= SMALL_ENOUGH:
        return Subject(builder, (), small)
    shrunk = shrink(model, target.mesh.tp, small.tp, target.resolved)
    return Subject(shrunk, shrunk.changes, small)


def small_mesh(mesh: MeshSpec, processes: int) -> MeshSpec:
    """The axes of ``mesh`` over ``processes``: tp first takes two, dp two more, and tp the rest."""
    dp = next((name for name, _ in mesh.axes if name in SHARDING), None)
    tp = min(mesh.tp, processes)
    if dp is not None and processes // tp == 1 and tp >= 4 and dict(mesh.axes)[dp] > 1:
        tp //= 2
    sizes = {TP: tp, dp: processes // tp}
    return MeshSpec(tuple((name, sizes.get(name, 1)) for name, _ in mesh.axes))


def prove(target: Target, subject: Subject, ranks: Ranks) -> tuple[Diagnostic, ...]:
    """Run one proof; what deviates, as findings: none where the plan is right.

    Args:
        target: the plan and its mode, resolved for the model at its real size, of which findings speak.
        subject: the small model.
        ranks: at least as many processes as the subject's mesh has ranks.

    Raises:
        PlanError: SP903, the model or a style cannot be handed to another process.
    """
    proof = Proof(
        subject.build, _runnable(target.resolved.plan), target.resolved.styles, subject.mesh, target.sequence_parallel
    )
    _require_sendable(target, proof)
    try:
        found = ranks.run(compare, proof, size=subject.mesh.size)
    except RanksFailedError as failed:
        found = [[Deviation("crash", "", str(failed), "the run")]]
    deviations = tuple(dict.fromkeys(deviation for rank in found for deviation in rank))
    return tuple(_findings(target, subject.mesh, deviations))


def _require_sendable(target: Target, proof: Proof) -> None:
    """Processes import classes and functions by name, and ``__main__`` is another module there."""
    try:
        pickled = pickle.dumps(proof)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = str(error)
    else:
        if b"__main__" not in pickled:
            return
        problem = "it is defined in __main__"
    raise PlanError([_not_sendable(target, problem)])


def _not_sendable(target: Target, problem: str) -> Diagnostic:
    name = target.resolved.inventory.architectures[0]
    return Diagnostic(
        "SP903",
        f"{name}, its builder or a style cannot be handed to the processes that run the proof: {problem}",
        subject=name,
        expected="classes and functions of importable modules",
        hint="move it into a module of its own",
    )


def _runnable(plan: Plan) -> Plan:
    """The plan in fp32 and on few ranks, over which a number to reshard over means nothing."""
    units = tuple(replace(unit, reshard=_without_number(unit.reshard)) for unit in plan.units)
    root = _without_number(plan.root_reshard)
    return replace(plan, units=units, root_reshard=root, mixed_precision=None, cpu_offload=None)


def _without_number(reshard: bool | int | None) -> bool | None:
    return reshard if reshard is None else bool(reshard)


def _findings(target: Target, mesh: MeshSpec, deviations: Sequence[Deviation]) -> list[Diagnostic]:
    """One finding for what is wrong first: the rest mostly follows from it."""
    if not deviations:
        return []
    first = _first(deviations)
    others = {d.subject for d in deviations if d.subject and d.what == first.what} - {first.subject}
    rule, name = (target.resolved.governing(first.subject) if first.subject else None), general(first.subject)
    more = f"; so are {count(len(others), 'other')}" if others else ""
    code, message, expected, hint = _words(first, name, more)
    governed = f" (rule {rule.pattern})" if rule else ""
    return [
        Diagnostic(
            code,
            f"{message}{governed}, in {first.when} on {mesh}",
            where=rule.where if rule else target.resolved.plan.where,
            subject=name or target.resolved.inventory.architectures[0],
            expected=expected,
            hint=hint,
        )
    ]


# What is told first when several things are wrong at once.
_ORDER = ("crash", "names", "activation", "logits", "loss", "gradient", "replicas", "norm", "parameter")


def _first(deviations: Sequence[Deviation]) -> Deviation:
    return min(deviations, key=lambda deviation: _ORDER.index(deviation.what))


def _words(deviation: Deviation, name: str, more: str) -> tuple[str, str, str, str]:
    """Code, message, expectation and way out."""
    text = deviation.text
    if deviation.what == "crash":
        at = f" at {name}" if name else ""
        return "SP401", f"the sharded model raises{at}: {text}", "a forward and a backward that run", ""
    if deviation.what == "activation":
        message = f"the sharded forward first departs at {name}: {text}"
        return "SP403", message, "the activations of the unsharded model", "look at the edges of its rule and below it"
    if deviation.what in ("logits", "loss"):
        return "SP403", f"the {deviation.what} is wrong: {text}".replace("logits is", "logits are"), "", ""
    if deviation.what == "norm":
        return "SP404", text, "the gradient norm of the unsharded model", "its gradients are right: look at placements"
    if deviation.what == "names":
        return "SP404", f"{name} {text}", "the parameters of the unsharded model", "place both ends of the tie alike"
    what = {"gradient": "the gradient of ", "parameter": "after training, "}.get(deviation.what, "")
    hint = "where each rank sees its part of the work only, use replicated_with_grad_allreduce"
    message = f"{what}{name} is {text}{more}" if what else f"{name}: {text}{more}"
    return "SP404", message, "what the unsharded model has", hint
