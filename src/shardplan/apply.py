"""The only stage that touches a model: TP and its edges, re-tying, recomputation, FSDP2, gradient sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardplan import _compat
from shardplan.compiled import CompiledPlan, Head
from shardplan.inventory import ancestors
from shardplan.loss import causal_lm_loss
from shardplan.mesh import REPLICATE
from shardplan.parallel.collectives import Ranks
from shardplan.parallel.gradients import Owner, sum_in_graph, sum_in_units
from shardplan.parallel.local import read_locally
from shardplan.parallel.recompute import recompute_forward
from shardplan.parallel.stream import Stream, begin, end
from shardplan.parallel.style import Identity, LocalStyle, logits_as_dtensor, split_sections
from shardplan.plan import MixedPrecision

APPLIED = "_shardplan"  # the attribute of a model under which its `Applied` is found


@dataclass
class Applied:
    """What a model carries after `apply`: the plan it runs under and the switches of its forward.

    Attributes:
        compiled: the plan.
        stream: state of the residual stream; None on a mesh without tp.
        gathered: whether the head gives callers whole logits.
        device_type: of the mesh.
    """

    compiled: CompiledPlan
    stream: Stream | None
    gathered: bool
    device_type: str


def apply(model: nn.Module, compiled: CompiledPlan, mesh: DeviceMesh) -> nn.Module:
    """Execute ``compiled`` on ``model``, in place.

    Args:
        model: on the mesh's device or on meta; the model that the plan was compiled for.
        compiled: a plan that the checks have passed.
        mesh: as described by ``compiled.mesh``.

    Returns:
        The same model.
    """
    stream = _shard_over_tp(model, compiled, mesh["tp"]) if compiled.mesh.has_tp else None
    if stream is None:
        _pack(model, compiled)
    gathered = compiled.head is not None and compiled.head.gathered
    applied = Applied(compiled, stream, gathered, mesh.device_type)
    if stream is not None and compiled.head is not None:
        _finish_logits(model, compiled.head, mesh["tp"], applied)
    for fqn in compiled.recompute:
        recompute_forward(compiled.find(model, fqn))
    units = _shard_over_dp(model, compiled, mesh) if compiled.mesh.has_dp else []
    if stream is not None:
        _flatten_sharding_axes(model)
        _sum_gradients(model, compiled, units, stream.ranks)
    setattr(compiled.find(model, ""), APPLIED, applied)
    return model


def applied_to(model: nn.Module) -> Applied | None:
    """What an earlier `apply` left on ``model`` or on a part of it."""
    return next((module.__dict__[APPLIED] for module in model.modules() if APPLIED in module.__dict__), None)


def required_of(model: nn.Module) -> Applied:
    """As `applied_to`.

    Raises:
        ValueError: no plan was applied to it.
    """
    applied = applied_to(model)
    if applied is None:
        raise ValueError("no plan was applied to this model: call apply_plan first")
    return applied


def _shard_over_tp(model: nn.Module, compiled: CompiledPlan, tp: DeviceMesh) -> Stream:
    neighbours = {size: _ranks(_compat.neighbours(tp, size)) for size in sorted(compiled.neighbours)}
    stream = Stream(_ranks(tp), compiled.sequence_parallel, compiled.cut_by_embedding, neighbours=neighbours)
    placed: dict[Identity, nn.Parameter] = {}
    for module in reversed(compiled.modules):  # inner ones first: a block asks what the linears in it have become
        linears = [model.get_submodule(linear.path) for linear in compiled.column_wise_behind(module)]
        LocalStyle(module, stream, placed, linears)._apply(model.get_submodule(module.path), tp)
    if compiled.sequence_parallel:
        assert compiled.decoder is not None
        assert compiled.gather is not None
        compiled.find(model, compiled.decoder).register_forward_pre_hook(partial(begin, stream), with_kwargs=True)
        compiled.find(model, compiled.gather).register_forward_hook(partial(end, stream))
    return stream


def _ranks(axis: DeviceMesh) -> Ranks:
    return Ranks(axis.get_group().group_name, axis.get_local_rank(), axis.size())


def _pack(model: nn.Module, compiled: CompiledPlan) -> None:
    """Without tp: packed parameters lie in sections all the same, since what is saved may not depend on tp."""
    packed = {module.fqn for module in compiled.modules if any(parameter.sections for parameter in module.parameters)}
    parents = {next(ancestors(fqn)) for fqn in packed}
    for module in compiled.modules:
        if (module.parameters or module.reads_children) and module.fqn in packed | parents:
            found = model.get_submodule(module.path)
            split_sections(found, module)
            read_locally(found, module, None)


def _finish_logits(model: nn.Module, head: Head, tp: DeviceMesh, applied: Applied) -> None:
    """Hand out logits as one DTensor, and let ``labels=`` compute the loss on it."""
    applied.compiled.find(model, head.fqn).register_forward_hook(partial(_logits, applied, tp, head.vocabulary))
    owner: Any = applied.compiled.find(model, "")
    # Any other loss of transformers raises on DTensor logits by itself.
    if getattr(getattr(owner, "loss_function", None), "__name__", "") == "ForCausalLMLoss":
        owner.loss_function = causal_lm_loss


def _logits(
    applied: Applied, tp: DeviceMesh, vocabulary: int, _module: nn.Module, _args: Any, output: Tensor
) -> Tensor:
    logits = logits_as_dtensor(tp, vocabulary, output)
    return logits.full_tensor() if applied.gathered else logits


# ---------------------------------------------------------------- FSDP2


def _shard_over_dp(model: nn.Module, compiled: CompiledPlan, mesh: DeviceMesh) -> list[FSDPModule]:
    # The model's own inputs are cast to the parameters' dtype; what runs between its modules is theirs to decide.
    # FSDP2 would also cast position tables that a model keeps in fp32.
    policy = _mixed_precision(compiled.mixed_precision)
    inner_policy = replace(policy, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": _dp_mesh(compiled, mesh),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if compiled.cpu_offload
        else OffloadPolicy(),
    }
    for unit in compiled.units:
        fully_shard(
            model.get_submodule(unit.path), reshard_after_forward=unit.reshard, mp_policy=inner_policy, **options
        )
    fully_shard(model, reshard_after_forward=compiled.root_reshard, mp_policy=policy, **options)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _dp_mesh(compiled: CompiledPlan, mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh that shards, or the 2-D mesh that replicates over its first axis (HSDP)."""
    axes = compiled.mesh.shard_axes
    name = axes[0] if len(axes) == 1 else "_".join(axes)
    if len(axes) > 1:
        mesh[axes]._flatten(name)
    replicate = compiled.mesh.replicate_axis
    return mesh[(replicate, name)] if replicate else mesh[name]


def _flatten_sharding_axes(model: nn.Module) -> None:
    """One group for dp and tp: a gradient norm is one all-reduce over it. Without it torch takes two, and warns."""
    mesh = next(parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    sharding = tuple(dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if name != REPLICATE)
    if len(sharding) > 1:
        _compat.flatten(mesh, sharding)


def _mixed_precision(policy: MixedPrecision | None) -> MixedPrecisionPolicy:
    if policy is None:
        return MixedPrecisionPolicy()
    dtypes = {name: getattr(torch, value) for name, value in (
        ("param_dtype", policy.param), ("reduce_dtype", policy.reduce), ("output_dtype", policy.output)
    ) if value is not None}  # fmt: skip
    return MixedPrecisionPolicy(**dtypes)


# ---------------------------------------------------------------- gradients


def _sum_gradients(model: nn.Module, compiled: CompiledPlan, units: list[FSDPModule], ranks: Ranks) -> None:
    partial_gradients = [(module.fqn, parameter.name) for module, parameter in compiled.summed_parameters()]
    owners: list[Owner] = [(compiled.find(model, fqn), name) for fqn, name in partial_gradients]
    if units:
        sum_in_units(units, owners, ranks)
    else:
        # A caller may run the decoder alone; start there unless something outside it needs the sum too.
        decoder = compiled.decoder or ""
        inside = all(fqn.startswith(f"{decoder}.") for fqn, _ in partial_gradients)
        sum_in_graph(compiled.find(model, decoder) if inside else model, owners, ranks)
