"""The library's entry points: `apply_plan` and the same path without its last stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Diagnostic, PlanError, errors
from shardplan.inventory import Inventory, take_inventory
from shardplan.lower import lower
from shardplan.merge import PlanSource, read_plan
from shardplan.mesh import MeshSpec, mesh_spec, parse_mesh
from shardplan.plan import Plan
from shardplan.resolve import resolve
from shardplan.styles import STYLES, Style

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def check_plan(
    plan: PlanSource | Sequence[PlanSource],
    model: nn.Module | Inventory,
    mesh: MeshSpec | str,
    *,
    sequence_parallel: bool | None = None,
    styles: Mapping[str, Style] = STYLES,
) -> tuple[Diagnostic, ...]:
    """Every finding about ``plan`` on ``model`` and ``mesh``; empty when all is well.

    Args:
        plan: a path, a shipped name, a `Plan`, or a list of layers.
        model: a real or meta-device model, or its inventory.
        mesh: axes and sizes, such as ``"dp=2,tp=4"``.
        sequence_parallel: None leaves the question to the plan, which leaves it off unless it says otherwise.
        styles: the known styles by name.

    Raises:
        PlanError: the plan or the mesh cannot be read.
    """
    return check(_target(read_plan(plan), model, mesh, sequence_parallel, styles))


def compile_plan(
    plan: PlanSource | Sequence[PlanSource],
    model: nn.Module | Inventory,
    mesh: MeshSpec | str,
    *,
    sequence_parallel: bool | None = None,
    styles: Mapping[str, Style] = STYLES,
) -> CompiledPlan:
    """What `apply_plan` would execute: exact names, placements, collectives and units. Arguments as for `check_plan`.

    Raises:
        PlanError: with every finding, where one of them is an error.
    """
    target = _target(read_plan(plan), model, mesh, sequence_parallel, styles)
    findings = check(target)
    if errors(findings):
        raise PlanError(findings)
    return lower(target.resolved, target.mesh, sequence_parallel=target.sequence_parallel)


def apply_plan(
    model: nn.Module,
    plan: PlanSource | Sequence[PlanSource],
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool | None = None,
) -> nn.Module:
    """Shard ``model`` over ``mesh`` as ``plan`` says, in place.

    Afterwards tied weights are one parameter and every parameter is a DTensor, so that stock
    `torch.nn.utils.clip_grad_norm_`, optimizers and `torch.distributed.checkpoint` work. Logits are a DTensor sharded
    over the vocabulary; ``labels=`` and `shardplan.cross_entropy` take them as they are.

    Args:
        model: a model on the mesh's device, with equal weights on all ranks, or on the meta device.
        plan: a path, a shipped name such as ``"llama"``, a `Plan`, or a list of layers of which later ones win.
        mesh: named axes: ``tp``; one of ``dp``, ``fsdp``, ``dp_shard``; beside it ``dp_replicate`` and ``cp``.
        sequence_parallel: cut the residual stream over tp; None leaves the question to the plan.

    Returns:
        The same model.

    Raises:
        PlanError: with every finding on every rank; parameters, hooks and classes are untouched.
    """
    from shardplan import agreement, apply

    compiled: CompiledPlan | None = None
    findings: tuple[Diagnostic, ...] = ()
    try:
        if hasattr(model, apply.APPLIED):
            raise PlanError([_already_applied(model)])
        spec = mesh_spec(mesh.mesh_dim_names, mesh.shape)
        compiled = compile_plan(plan, model, spec, sequence_parallel=sequence_parallel)
    except PlanError as refused:
        findings = refused.diagnostics
    agreement.require(model, compiled, findings, mesh)
    assert compiled is not None
    return apply.apply(model, compiled, mesh)


def _target(
    plan: Plan,
    model: nn.Module | Inventory,
    mesh: MeshSpec | str,
    sequence_parallel: bool | None,
    styles: Mapping[str, Style],
) -> Target:
    inventory = model if isinstance(model, Inventory) else take_inventory(model)
    spec = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    cuts = bool(plan.sequence_parallel if sequence_parallel is None else sequence_parallel)
    return Target(resolve(plan, inventory, styles), spec, sequence_parallel=cuts)


def _already_applied(model: nn.Module) -> Diagnostic:
    return Diagnostic(
        "SP302",
        f"this {type(model).__name__} already has a plan applied",
        where=None,
        subject=type(model).__name__,
        expected="a model as it was built",
        hint="apply all layers in one call: apply_plan(model, [plan, overlay], mesh)",
    )
