"""The library's entry points: `apply_plan` and the same path without its last stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Diagnostic, PlanError, errors
from shardplan.from_python import Options, with_options
from shardplan.inventory import Inventory, take_inventory
from shardplan.lower import lower
from shardplan.merge import PlanSource, read_plan
from shardplan.mesh import MeshSpec, mesh_spec, parse_mesh
from shardplan.plan import MixedPrecision
from shardplan.resolve import resolve
from shardplan.styles import Style, known_styles

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

LOG = logging.getLogger("shardplan")

Layers = PlanSource | Sequence[PlanSource]
UserStyles = Mapping[str, "Style | ParallelStyle"]


def check_plan(
    plan: Layers,
    model: nn.Module | Inventory,
    mesh: MeshSpec | str,
    *,
    overrides: Layers | None = None,
    styles: UserStyles | None = None,
    **options: Any,
) -> tuple[Diagnostic, ...]:
    """Every finding about ``plan`` on ``model`` and ``mesh``; empty when all is well.

    Args:
        plan: a path, a shipped name, ``"auto"``, a `Plan`, a dict of patterns to styles, or a list of such layers.
        model: a real or meta-device model, or its inventory.
        mesh: axes and sizes, such as ``"dp=2,tp=4"``.
        overrides: layers on top of ``plan``.
        styles: styles of your own by name.
        options: the other options of `apply_plan`.

    Raises:
        PlanError: the plan, the mesh or an option cannot be read.
    """
    return check(_target(plan, overrides, model, mesh, styles, Options(**options)))


def compile_plan(
    plan: Layers,
    model: nn.Module | Inventory,
    mesh: MeshSpec | str,
    *,
    overrides: Layers | None = None,
    styles: UserStyles | None = None,
    **options: Any,
) -> CompiledPlan:
    """What `apply_plan` would execute: exact names, placements, collectives and units. Arguments as for `check_plan`.

    Raises:
        PlanError: with every finding, where one of them is an error.
    """
    target = _target(plan, overrides, model, mesh, styles, Options(**options))
    findings = check(target)
    if errors(findings):
        raise PlanError(findings)
    return lower(target.resolved, target.mesh, sequence_parallel=target.sequence_parallel)


def verify_plan(
    plan: Layers,
    model: nn.Module | Callable[[], nn.Module],
    mesh: MeshSpec | str,
    *,
    processes: int = 2,
    overrides: Layers | None = None,
    styles: UserStyles | None = None,
    **options: Any,
) -> tuple[Diagnostic, ...]:
    """`check_plan`, and where that finds no error the numeric proof: a small model on local processes, in fp32.

    The architecture of ``model`` is made small: the first layers that hold every kind, the same ratio of heads to tp,
    the same tying and kinds of experts. It is sharded over local gloo processes and compared with the unsharded one:
    logits, loss, every gradient, replicas, the gradient norm, parameters after AdamW steps.

    Args:
        plan, mesh, overrides, styles, options: as for `check_plan`. Without ``sequence_parallel`` both modes are run.
        model: a transformers model, on the meta device or not; or a function of a module that builds a small model,
            which is then taken as it is.
        processes: how many local ranks.

    Returns:
        Every finding of the checks, and SP401 (it raises), SP403 (its forward departs) or SP404 (its gradients do) with
        the first parameter or module that is wrong and the rule that governs it. Empty when the plan is proven right.

    Raises:
        PlanError: the plan, the mesh or an option cannot be read; SP903, the model cannot be made small.
    """
    from torch import nn

    from shardplan.verify.prove import make_subject, prove
    from shardplan.verify.ranks import LocalRanks

    built = model if isinstance(model, nn.Module) else model()
    first = _target(plan, overrides, built, mesh, styles, Options(**options))
    both = options.get("sequence_parallel") is None and first.resolved.plan.speaks_of_stream
    targets = [replace(first, sequence_parallel=mode) for mode in (False, True)] if both else [first]
    findings = {finding: None for target in targets for finding in check(target)}
    if errors(findings):
        return tuple(findings)
    subject = make_subject(built, first, processes, builder=None if model is built else model)
    with LocalRanks(subject.mesh.size) as ranks:
        return (*findings, *(found for target in targets for found in prove(target, subject, ranks)))


def apply_plan(
    model: nn.Module,
    plan: Layers,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool | None = None,
    overrides: Layers | None = None,
    mixed_precision: MixedPrecisionPolicy | MixedPrecision | Mapping[str, str] | bool | None = None,
    cpu_offload: bool | None = None,
    recompute: Sequence[str] | bool | None = None,
    styles: UserStyles | None = None,
) -> nn.Module:
    """Shard ``model`` over ``mesh`` as ``plan`` says, in place.

    Afterwards tied weights are one parameter and every parameter is a DTensor, so that stock
    `torch.nn.utils.clip_grad_norm_`, optimizers and `torch.distributed.checkpoint` work. Logits are a DTensor sharded
    over the vocabulary; ``labels=`` and `shardplan.cross_entropy` take them as they are. For every option None leaves
    the question to the plan, and False turns the thing off.

    Args:
        model: a model on the mesh's device, with equal weights on all ranks, or on the meta device.
        plan: a path, a shipped name such as ``"llama"``, ``"auto"`` for the plan shipped for the model, else
            transformers' own, a `Plan`, a dict of patterns to style strings or torch ``ParallelStyle``s, or a list of
            layers of which later ones win.
        mesh: named axes: ``tp``; one of ``dp``, ``fsdp``, ``dp_shard``; beside it ``dp_replicate`` and ``cp``.
        sequence_parallel: cut the residual stream over tp.
        overrides: one more layer or list of layers, on top of ``plan``.
        mixed_precision: FSDP2's policy, or its dtypes by name under ``param``, ``reduce`` and ``output``.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory.
        recompute: patterns of modules whose activations are recomputed in the backward.
        styles: styles of your own by name, as rows (`Style`) or as torch ``ParallelStyle``s applied as they stand.

    Returns:
        The same model. Warnings and notes about the plan go to the log ``shardplan`` of the first rank.

    Raises:
        PlanError: with every finding on every rank; parameters, hooks and classes are untouched.
    """
    from shardplan import agreement, apply

    options = Options(sequence_parallel, mixed_precision, cpu_offload, recompute)
    compiled: CompiledPlan | None = None
    findings: tuple[Diagnostic, ...] = ()
    try:
        if apply.applied_to(model) is not None:
            raise PlanError([_already_applied(model)])
        spec = mesh_spec(mesh.mesh_dim_names, mesh.shape)
        target = _target(plan, overrides, model, spec, styles, options)
        findings = check(target)
        if not errors(findings):
            compiled = lower(target.resolved, spec, sequence_parallel=target.sequence_parallel)
    except PlanError as refused:
        findings = refused.diagnostics
    agreement.require(model, compiled, findings, mesh)
    assert compiled is not None
    for finding in findings if mesh.get_rank() == mesh.mesh.flatten()[0] else ():
        LOG.warning("%s", finding)
    return apply.apply(model, compiled, mesh)


@contextmanager
def gathered_logits(model: nn.Module) -> Iterator[None]:
    """While it lasts, ``model`` returns whole logits as plain tensors: for evaluation and ``generate()``.

    Every rank of a tp group must run the same forwards.

    Raises:
        ValueError: no plan was applied to ``model``.
    """
    from shardplan import apply

    applied = apply.applied_to(model)
    if applied is None:
        raise ValueError(f"gathered_logits needs a model with a plan applied; this {type(model).__name__} has none")
    before, applied.gathered = applied.gathered, True
    try:
        yield
    finally:
        applied.gathered = before


def _target(
    plan: Layers,
    overrides: Layers | None,
    model: nn.Module | Inventory,
    mesh: MeshSpec | str,
    styles: UserStyles | None,
    options: Options,
) -> Target:
    inventory = model if isinstance(model, Inventory) else take_inventory(model)
    layers = [*_listed(plan), *_listed(overrides)]
    merged = with_options(read_plan(layers, inventory.architectures), options)
    spec = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    resolved = resolve(merged, inventory, known_styles(styles))
    return Target(resolved, spec, sequence_parallel=bool(merged.sequence_parallel))


def _listed(layers: Layers | None) -> list[PlanSource]:
    if layers is None:
        return []
    return list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else [layers]


def _already_applied(model: nn.Module) -> Diagnostic:
    return Diagnostic(
        "SP302",
        f"this {type(model).__name__} already has a plan applied",
        subject=type(model).__name__,
        expected="a model as it was built",
        hint="apply all layers in one call: apply_plan(model, [plan, overlay], mesh)",
    )
