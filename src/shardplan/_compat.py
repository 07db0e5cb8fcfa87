"""Every private name of torch and transformers that shardplan leans on, with the version it was seen on.

tests/test_compat.py pins the behaviour behind each, so that an upgrade tells us.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

# torch 2.13: out-of-place collectives that take the group's *name*, a constant for dynamo and picklable.
_c10d = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: str, op: str = "sum", *, wait: bool = True) -> torch.Tensor:
    """Sum (or ``op``) of ``x`` over the group, as a new tensor; without ``wait``, one that must be waited for."""
    return _run(wait, _c10d.all_reduce, x.contiguous(), op, group)


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The ranks' ``x`` joined along dim 0."""
    return _run(True, _c10d.all_gather_into_tensor, x.contiguous(), size, group)


def reduce_scatter(x: torch.Tensor, group: str, size: int, *, wait: bool = True) -> torch.Tensor:
    """This rank's chunk, along dim 0, of the sum of ``x`` over the group; ``wait`` as for `all_reduce`."""
    return _run(wait, _c10d.reduce_scatter_tensor, x.contiguous(), "sum", size, group)


def wait(x: torch.Tensor) -> torch.Tensor:
    """``x``, once the collective that makes it has ended."""
    with torch._C._AutoDispatchBelowAutograd():
        return _waited(x)


def _run(wait: bool, collective: Any, *args: Any) -> torch.Tensor:
    """The collective and, if wanted, its end.

    torch 2.13 gives its functional collectives an autograd kernel in Python, which costs as much as they do; who calls
    them here has the gradient in hand already.
    """
    if torch.compiler.is_compiling():
        return _waited(collective(*args))
    with torch._C._AutoDispatchBelowAutograd():
        started: torch.Tensor = collective(*args)
        return _waited(started) if wait else started


def _waited(x: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _c10d.wait_tensor(x)
    return waited


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """torch 2.13: the mesh that ``mesh`` is a slice of, or ``mesh`` itself."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def groups_over(mesh: DeviceMesh, dims: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the groups over which a reduction over ``dims`` of ``mesh`` goes: one where these were flattened."""
    flattened = _flattened(mesh, dims) if len(dims) > 1 else None
    if flattened is not None:
        return (flattened.get_group().group_name,)
    return tuple(mesh.get_group(dim).group_name for dim in dims)


def flatten(mesh: DeviceMesh, dims: tuple[int, ...]) -> None:
    """torch 2.13: give ``dims`` of ``mesh`` one group, which DTensor then uses for a reduction over all of them.

    Every rank of the world takes part; nothing is done where the group is there.
    """
    if _flattened(mesh, dims) is None:
        mesh[tuple((mesh.mesh_dim_names or ())[dim] for dim in dims)]._flatten()


def neighbours(axis: DeviceMesh, size: int) -> DeviceMesh:
    """torch 2.13: the 1-D mesh of ``size`` neighbouring ranks of ``axis``, this one among them; every rank calls it."""
    unflattened: DeviceMesh = axis._unflatten(0, (axis.size() // size, size), (f"apart_{size}", f"neighbours_{size}"))
    return unflattened[f"neighbours_{size}"]


def _flattened(mesh: DeviceMesh, dims: tuple[int, ...]) -> DeviceMesh | None:
    """torch 2.13: the flattened mesh over ``dims``, by whatever name: the look-up of DTensor's own reductions.

    It raises KeyError where ``dims`` are in another order in the mesh that all were cut from.
    """
    from torch.distributed.tensor._redistribute import _get_flattened_mesh_by_layout

    try:
        return _get_flattened_mesh_by_layout(mesh, dims)
    except KeyError:
        return None


def fsdp_parameters(unit: FSDPModule) -> list[Any]:
    """torch 2.13: the unit's parameters in the order of its flat reduced gradient.

    Each has ``sharded_param`` and ``padded_sharded_param_size``; the flat gradient holds the trainable ones, each
    padded to that size. The public `set_all_reduce_hook` hands over the flat gradient without saying which is where.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    return list(group.fsdp_params) if group is not None else []


# ---------------------------------------------------------------- runs without weights and ranks


def fake_store() -> Store:
    """torch 2.13: the store of the ``fake`` backend, whose collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_tensors() -> AbstractContextManager[Any]:
    """torch 2.13: inside, tensors have shapes and dtypes but no memory. Meta tensors may come in from outside."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def choose_experts_of_fixed_shape(model: Any) -> None:
    """transformers 5.24: of the ways to run experts, the one whose shapes do not depend on values.

    The loop over experts looks at the routes; ``grouped_mm`` takes fake tensors of bfloat16 alone.
    """
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")


def has_values(x: torch.Tensor) -> bool:
    """torch 2.13: False for a fake or meta tensor, of which no condition can be asked."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(x, FakeTensor) and not x.is_meta


def needs_values(error: BaseException) -> bool:
    """torch 2.13: whether a fake tensor raised because an operation depends on values, not on the plan."""
    from torch._subclasses import fake_tensor

    return isinstance(error, fake_tensor.DataDependentOutputException | fake_tensor.DynamicOutputShapeException)


def group_of(args: Sequence[Any]) -> str:
    """torch 2.13: the group's name among a dispatched collective's arguments: text, or a boxed group."""
    for arg in reversed(args):
        if isinstance(arg, str):
            return arg
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(torch.distributed.ProcessGroup.unbox(arg).group_name)
    return ""


def next_node() -> int:
    """torch 2.13: the number that the next node of the autograd graph gets in this thread; they only grow."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def running_backward() -> int:
    """torch 2.13: the number of the backward that is running in this thread, which no other one has; -1 outside."""
    number: int = torch._C._current_graph_task_id()
    return number


def running_node() -> tuple[int, str] | None:
    """torch 2.13: number and name of the autograd node whose backward is running in this thread.

    None outside a backward, and for the accumulation of gradients, whose nodes have no number of their own.
    """
    node = torch._C._current_autograd_node()
    if node is None or "AccumulateGrad" in node.name():
        return None
    return node._sequence_nr(), node.name()


def fsdp_label(text: str) -> str | None:
    """torch 2.13: the path of the unit that FSDP2 works on, out of the label it gives a profiler; "" is the model.

    ``FSDP::all_gather (model.layers.0)``. None for other labels.
    """
    if not text.startswith("FSDP::"):
        return None
    return text.partition(" (")[2].removesuffix(")")


def forget_meshes() -> None:
    """torch 2.13: DTensor's caches hold meshes, by equality, and with them their groups.

    The next equal mesh has groups of other names; and each group of gloo keeps three threads alive.
    """
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cached in dtensor_caches():
        cached.cache_clear()


@cache
def dtensor_caches() -> tuple[Any, ...]:
    """torch 2.13: the caches among DTensor's functions, some of them in closures; found once, since that takes long."""
    import torch.distributed.tensor  # noqa: F401 - makes them

    kind = type(cache(lambda: None))
    objects = (found for found in gc.get_objects() if type(found) is kind)
    return tuple(found for found in objects if (found.__module__ or "").startswith("torch.distributed.tensor."))


class _Local(Function):
    """What `DTensor.to_local` does, but that its backward takes the parameter's layout for the gradient's as it is.

    torch's own works out shape and stride of the whole anew, which is most of what reading a small weight costs.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.spec = parameter._spec
        local: torch.Tensor = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor | None:
        return laid_out(grad, ctx.spec)


def laid_out(grad: torch.Tensor | None, spec: Any) -> DTensor | None:
    """This rank's part of a gradient as a DTensor with its parameter's ``spec``."""
    if grad is None:
        return None
    if torch.is_grad_enabled():  # a gradient that is to be differentiated again
        return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False)
    return DTensor(grad.contiguous(), spec, requires_grad=False)


def local(parameter: DTensor) -> torch.Tensor:
    """torch 2.13: this rank's part of a parameter; its gradient is laid out as the parameter is."""
    if torch.compiler.is_compiling() or not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter.to_local()
    read: torch.Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]  # torch's
    return read


# ---------------------------------------------------------------- checkpoints of transformers


def convert_for_model(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """transformers 5.24: rename and convert a checkpoint's tensors into those of ``model``, as `from_pretrained` does.

    Returns:
        Its report: missing, unexpected and mismatched keys, and conversions that raised. ``model`` remembers the
        conversions that were used.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    conversions: list[Any] = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(weight_mapping=conversions)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one on every rank
    try:
        report, _ = convert_and_load_state_dict_in_model(model, tensors, config)
    finally:
        if bars:
            logging.enable_progress_bar()
    report.missing_keys = set()  # ties are not known to it yet
    model._adjust_missing_and_unexpected_keys(report)
    return report


def convert_for_checkpoint(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5.24: the other direction, as `save_pretrained` does it."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return converted


def keep_conversions(source: Any, target: Any) -> None:
    """transformers 5.24: ``target`` is saved with the conversions that ``source`` was loaded or is saved with."""
    conversions = getattr(source, "_weight_conversions", None)
    if conversions is not None:
        target._weight_conversions = conversions


def compute_unsaved_buffers(model: Any) -> None:
    """transformers 5.24: have ``model`` compute the buffers that are in no checkpoint, and nothing else.

    Its initialisation passes over what has the attribute ``_is_hf_initialized``. A module that has such buffers below
    it is not passed over: FalconH1Model fills those of its layers' mixers. Random numbers that an initialisation draws
    for nothing are given back.
    """
    for module in model.modules():
        module._is_hf_initialized = not any(below._non_persistent_buffers_set for below in module.modules())
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor._is_hf_initialized = True
        for name in module._non_persistent_buffers_set:
            if module._buffers[name] is not None:
                module._buffers[name]._is_hf_initialized = False
    with torch.random.fork_rng(devices=()):
        model.initialize_weights()
