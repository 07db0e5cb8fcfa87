"""The parity contract, as it runs on every rank: a sharded model against the unsharded one, gradient by gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

import multimodal
import tiny_models
import tolerances
from multimodal import Seeing, with_images
from shardplan import apply_plan, cross_entropy
from shardplan.apply import applied_to
from shardplan.mesh import parse_mesh
from shardplan.weights import Stored, stored_parameters

ROWS = 4  # of a global batch; every dp degree in use divides it
LR = 1e-3
CLIP = 0.1  # below every gradient norm here: clipping scales


@dataclass(frozen=True)
class Batch:
    """One way to call the model. ``positions``: given, absent or restarting (packed)."""

    length: int = 16
    attention: str = "sdpa"
    mask: bool = False
    positions: str = "absent"
    labels: bool = False
    image: bool = False  # one in each row, for models that see


MICRO_BATCHES = (Batch(length=16), Batch(length=5))


@dataclass(frozen=True)
class Case:
    """One application of a plan to one model, on which several batches are compared."""

    model: str
    mesh: str
    sequence_parallel: bool
    plan: Any = None  # the shipped one for the model
    changes: dict[str, Any] = field(default_factory=dict)  # of the model's config
    options: dict[str, Any] = field(default_factory=dict)  # of apply_plan
    checkpointing: bool = False  # transformers' own, switched on afterwards
    images: bool = False  # in the micro-batches that are accumulated
    training: bool = True  # steps of AdamW at the end, too: the dear half, for one mesh of each model at least

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        plan = self.plan or tiny_models.plan_of(self.model)
        return apply_plan(model, plan, mesh, sequence_parallel=self.sequence_parallel, **self.options)

    @property
    def world_size(self) -> int:
        return parse_mesh(self.mesh).size


def build_mesh(text: str) -> DeviceMesh:
    spec = parse_mesh(text)
    return init_device_mesh("cpu", [size for _, size in spec.axes], mesh_dim_names=[name for name, _ in spec.axes])


def compare(case: Case, batches: list[Batch]) -> list[str]:
    """Every violation of the contract, in words; empty when all holds."""
    reference = tiny_models.build(case.model, **case.changes)
    mesh = build_mesh(case.mesh)
    sharded = case.apply(tiny_models.build(case.model, **case.changes), mesh)
    if case.checkpointing:
        for model in (reference, sharded):
            model.activation_checkpointing_enable()
    faults = list(_same_names(reference, sharded))
    for number, batch in enumerate(batches):
        faults += [f"{batch}: {fault}" for fault in compare_batch(reference, sharded, mesh, batch, seed=number)]
    micro_batches = [replace(batch, image=case.images) for batch in MICRO_BATCHES]
    faults += [f"accumulation: {fault}" for fault in compare_accumulation(reference, sharded, mesh, micro_batches)]
    if case.training:
        faults += [f"training: {fault}" for fault in compare_training(reference, sharded, mesh, micro_batches)]
    return faults


# ---------------------------------------------------------------- one forward and backward


def compare_batch(reference: nn.Module, sharded: nn.Module, mesh: DeviceMesh, batch: Batch, seed: int) -> Iterator[str]:
    inputs, targets = inputs_for(reference, batch, seed)
    own = {name: rows_of(value, mesh) for name, value in inputs.items()}
    for model in (reference, sharded):
        model.set_attn_implementation(batch.attention)  # type: ignore[operator]
        model.zero_grad()
    expected = step(reference, inputs, targets)
    actual = step(sharded, own, rows_of(targets, mesh))
    yield from _same_logits(rows_of(expected.logits, mesh), whole(actual.logits))
    yield from _same_number("loss", mean_over_dp(actual.loss.detach(), mesh), expected.loss.detach(), tolerances.LOSS)
    yield from same_gradients(reference, sharded)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor


def step(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor, weight: float = 1.0) -> Output:
    """Forward and backward; the loss is transformers' own where ``labels`` are among the inputs."""
    output = model(**inputs, use_cache=False)
    loss = output.loss if "labels" in inputs else cross_entropy(output.logits, targets)
    (loss * weight).backward()
    return Output(output.logits.detach(), loss)


def vocabulary_of(model: nn.Module) -> int:
    vocabulary: int = model.config.get_text_config().vocab_size  # type: ignore[operator,union-attr]
    return vocabulary


def inputs_for(model: nn.Module, batch: Batch, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """`make_inputs` with the model's vocabulary, and its kind of images where the batch has some."""
    seeing = multimodal.seeing_of(model) if batch.image else None
    return make_inputs(batch, seed, vocabulary_of(model), seeing)


def make_inputs(
    batch: Batch, seed: int = 0, vocabulary: int = tiny_models.VOCABULARY, seeing: Seeing | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The global batch: ROWS x length ids, and targets that also exist for a sequence of one."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(0, tiny_models.VOCABULARY, (ROWS, batch.length), generator=generator) % vocabulary
    inputs = {"input_ids": ids}
    if batch.mask:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][::2, -(-batch.length // 3) :] = 0 if batch.length > 1 else 1
    if batch.positions != "absent":
        start = batch.length // 2 if batch.positions == "restarting" else 0
        positions = torch.cat([torch.arange(start), torch.arange(batch.length - start)])
        inputs["position_ids"] = positions.expand(ROWS, -1).contiguous()
    if seeing is not None:
        inputs |= with_images(seeing, ids, generator)
    if batch.labels:
        inputs["labels"] = ids.clone()
        inputs["labels"][:, 1] = -100  # the same number in each row, so that a mean of means is the mean
    return inputs, torch.randint(0, tiny_models.VOCABULARY, ids.shape, generator=generator) % vocabulary


# ---------------------------------------------------------------- training


def compare_accumulation(
    reference: nn.Module, sharded: nn.Module, mesh: DeviceMesh, batches: Sequence[Batch] = MICRO_BATCHES
) -> Iterator[str]:
    """Gradients and their norm after two micro-batches, of which the first synchronises gradients or does not."""
    for synchronises in (True, False) if isinstance(sharded, FSDPModule) else (True,):
        for model in (reference, sharded):
            model.zero_grad()
        accumulate(reference, sharded, mesh, batches, seed=0, synchronises=synchronises)
        yield from (f"first synchronises {synchronises}: {fault}" for fault in same_gradients(reference, sharded))
        expected, actual = (torch.nn.utils.clip_grad_norm_(m.parameters(), CLIP) for m in (reference, sharded))
        yield from _same_number("gradient norm", whole(actual), expected, tolerances.NORM)
        yield from (f"after clipping: {fault}" for fault in same_gradients(reference, sharded))


def compare_training(
    reference: nn.Module, sharded: nn.Module, mesh: DeviceMesh, batches: Sequence[Batch] = MICRO_BATCHES
) -> Iterator[str]:
    """Parameters after three clipped AdamW steps of two micro-batches each."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in (reference, sharded)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        accumulate(reference, sharded, mesh, batches, seed=10 * number, synchronises=number != 1)
        for model, optimizer in zip((reference, sharded), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    yield from different_replicas({name: p.detach() for name, p in sharded.named_parameters()})
    trained = stored_parameters(sharded)
    for name, expected in reference.named_parameters():
        difference = (trained[name].whole() - expected.detach()).norm().item()
        allowed = tolerances.PARAMETER * expected.norm().item() + tolerances.PARAMETER_LR * LR * sqrt(expected.numel())
        if not difference <= allowed:
            yield f"{name} after 3 steps differs by {difference:.1e}, allowed {allowed:.1e}"


def accumulate(
    reference: nn.Module,
    sharded: nn.Module,
    mesh: DeviceMesh,
    batches: Sequence[Batch],
    seed: int,
    synchronises: bool,
) -> None:
    """The micro-batches; ``synchronises`` says whether FSDP2 reduces all but the last by itself."""
    for number, batch in enumerate(batches):
        inputs, targets = inputs_for(reference, batch, seed + number)
        if isinstance(sharded, FSDPModule):
            sharded.set_requires_gradient_sync(synchronises or number == len(batches) - 1)
        step(reference, inputs, targets, weight=1 / len(batches))
        own = {name: rows_of(value, mesh) for name, value in inputs.items()}
        step(sharded, own, rows_of(targets, mesh), weight=1 / len(batches))


# ---------------------------------------------------------------- comparisons


def same_gradients(reference: nn.Module, sharded: nn.Module) -> Iterator[str]:
    """Every gradient of the reference against the gathered one; replicas are compared before any gather."""
    yield from different_replicas({name: p.grad for name, p in sharded.named_parameters() if p.grad is not None})
    stored = stored_in(sharded)
    total = sqrt(sum(p.grad.norm().item() ** 2 for p in reference.parameters() if p.grad is not None))
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        gradient = stored[name].gradient()
        if gradient is None:
            yield f"gradient of {name} is missing"
            continue
        difference = (gradient - parameter.grad).norm().item()
        allowed = tolerances.GRADIENT * parameter.grad.norm().item() + tolerances.GRADIENT_FLOOR * total
        if not difference <= allowed:
            relative = difference / (parameter.grad.norm().item() + 1e-30)
            yield f"gradient of {name} is off by {relative:.1e} of its norm"


def stored_in(model: nn.Module) -> dict[str, Stored]:
    """The parameters under the unsharded model's names, which to compare with it; of a model without a plan its own."""
    if applied_to(model) is not None:
        return stored_parameters(model)
    return {name: Stored(name, (parameter,)) for name, parameter in model.named_parameters()}


def different_replicas(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Tensors whose replicas are not bit-equal over a mesh axis on which they are replicated."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        for axis, placement in enumerate(tensor.placements):
            if placement == Replicate():
                local = tensor.to_local().detach().contiguous()
                copies = [torch.empty_like(local) for _ in range(tensor.device_mesh.size(axis))]
                dist.all_gather(copies, local, group=tensor.device_mesh.get_group(axis))
                if not all(torch.equal(copies[0], copy) for copy in copies):
                    yield f"replicas of {name} differ over mesh axis {axis}"


def _same_names(reference: nn.Module, sharded: nn.Module) -> Iterator[str]:
    expected = [name for name, _ in reference.named_parameters()]
    actual = list(stored_parameters(sharded))
    if expected != actual:
        yield f"parameters are {sorted(set(expected) ^ set(actual))} on one side only, or in another order"
    if dist.get_world_size() > 1 and not all(isinstance(p, DTensor) for p in sharded.parameters()):
        yield "a parameter is not a DTensor"


def _same_logits(expected: Tensor, actual: Tensor) -> Iterator[str]:
    if expected.shape != actual.shape:
        yield f"logits have shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    elif not (difference := (expected - actual).abs().max().item()) <= tolerances.LOGITS:
        yield f"logits differ by {difference:.1e}"


def _same_number(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> Iterator[str]:
    if not abs(actual.item() - expected.item()) <= tolerance * abs(expected.item()):
        yield f"{what} is {actual.item():.8g}, not {expected.item():.8g}"


# ---------------------------------------------------------------- ranks


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def data_axes(mesh: DeviceMesh) -> list[str]:
    return [name for name in mesh.mesh_dim_names or () if name != "tp"]


def rows_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rows of a global batch that this rank trains on."""
    for axis in data_axes(mesh):
        tensor = tensor.chunk(mesh[axis].size())[mesh.get_local_rank(axis)]
    return tensor


def mean_over_dp(value: Tensor, mesh: DeviceMesh) -> Tensor:
    for axis in data_axes(mesh):
        dist.all_reduce(value, group=mesh.get_group(axis))
        value = value / mesh[axis].size()
    return value
