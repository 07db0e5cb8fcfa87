"""The parity contract, as it runs on every rank: a sharded model against the unsharded one, gradient by gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

import multimodal
import tiny_models
import tolerances
from multimodal import Seeing, with_images
from pool import build_mesh
from shardplan import apply_plan, cross_entropy
from shardplan.apply import applied_to
from shardplan.mesh import parse_mesh
from shardplan.weights import Stored, copies_of, stored_parameters

T = TypeVar("T")

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


def compare(case: Case, batches: list[Batch], *, afresh: bool = False) -> list[str]:
    """Every violation of the contract, in words; empty when all holds.

    Args:
        afresh: compute what the unsharded model does, where something about it is altered or counted; else it is
            computed once in a process.
    """
    reference = Reference(tiny_models.build(case.model, **case.changes)) if afresh else kept(case.model, case.changes)
    mesh = build_mesh(case.mesh)
    sharded = case.apply(tiny_models.build(case.model, **case.changes), mesh)
    if case.checkpointing:
        sharded.activation_checkpointing_enable()  # type: ignore[operator]
    faults = list(same_names(reference.model, sharded))
    for batch in batches:
        seed = crc32(repr(batch).encode()) % 1000
        faults += [f"{batch}: {fault}" for fault in compare_batch(reference, sharded, mesh, batch, seed)]
    micro_batches = tuple(replace(batch, image=case.images) for batch in MICRO_BATCHES)
    faults += [f"accumulation: {fault}" for fault in compare_accumulation(reference, sharded, mesh, micro_batches)]
    if case.training:
        faults += [f"training: {fault}" for fault in compare_training(reference, sharded, mesh, micro_batches)]
    return faults


# ---------------------------------------------------------------- what is to be expected


@dataclass(frozen=True)
class Expected:
    """Of one batch."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Accumulated:
    """Of some micro-batches: gradients before and after clipping, and their norm."""

    gradients: dict[str, Tensor]
    norm: Tensor
    clipped: dict[str, Tensor]


class Reference:
    """An unsharded model and what it computes, each thing once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._known: dict[Any, Any] = {}

    def batch(self, batch: Batch, seed: int) -> Expected:
        return self._once(("batch", batch, seed), lambda: self._batch(batch, seed))

    def accumulated(self, batches: tuple[Batch, ...]) -> Accumulated:
        return self._once(("accumulated", batches), lambda: self._accumulated(batches))

    def trained(self, batches: tuple[Batch, ...]) -> dict[str, Tensor]:
        """Parameters after the steps of `compare_training`."""
        return self._once(("trained", batches), lambda: self._trained(batches))

    def _once(self, key: Any, compute: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = compute()
        known: T = self._known[key]
        return known

    def _batch(self, batch: Batch, seed: int) -> Expected:
        inputs, targets = inputs_for(self.model, batch, seed)
        self.model.zero_grad()
        output = step(with_attention(self.model, batch), inputs, targets)
        return Expected(output.logits, output.loss.detach(), gradients_of(self.model))

    def _accumulated(self, batches: tuple[Batch, ...]) -> Accumulated:
        self.model.zero_grad()
        accumulate(self.model, batches, seed=0)
        gradients = gradients_of(self.model)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        return Accumulated(gradients, norm, gradients_of(self.model))

    def _trained(self, batches: tuple[Batch, ...]) -> dict[str, Tensor]:
        copied = copy.deepcopy(self.model)
        train(copied, batches)
        return {name: parameter.detach() for name, parameter in copied.named_parameters()}


_KEPT: dict[str, Reference] = {}


def kept(model: str, changes: dict[str, Any]) -> Reference:
    """The one of this process: many cases ask the same of the same model."""
    key = f"{model} {sorted(changes.items())}"
    if key not in _KEPT:
        _KEPT[key] = Reference(tiny_models.build(model, **changes))
    return _KEPT[key]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies, which clipping leaves alone."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------- one forward and backward


def compare_batch(reference: Reference, sharded: nn.Module, mesh: DeviceMesh, batch: Batch, seed: int) -> Iterator[str]:
    expected = reference.batch(batch, seed)
    inputs, targets = inputs_for(reference.model, batch, seed)
    own = {name: rows_of(value, mesh) for name, value in inputs.items()}
    sharded.zero_grad()
    actual = step(with_attention(sharded, batch), own, rows_of(targets, mesh))
    yield from same_logits(rows_of(expected.logits, mesh), whole(actual.logits))
    yield from _same_number("loss", mean_over_dp(actual.loss.detach(), mesh), expected.loss, tolerances.LOSS)
    yield from same_gradients(expected.gradients, sharded)


def with_attention(model: nn.Module, batch: Batch) -> nn.Module:
    model.set_attn_implementation(batch.attention)  # type: ignore[operator]
    return model


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
    reference: Reference, sharded: nn.Module, mesh: DeviceMesh, batches: tuple[Batch, ...] = MICRO_BATCHES
) -> Iterator[str]:
    """Gradients and their norm after two micro-batches, of which the first synchronises gradients or does not."""
    expected = reference.accumulated(batches)
    for synchronises in (True, False) if isinstance(sharded, FSDPModule) else (True,):
        sharded.zero_grad()
        accumulate(sharded, batches, seed=0, mesh=mesh, synchronises=synchronises)
        said = f"first synchronises {synchronises}"
        yield from (f"{said}: {fault}" for fault in same_gradients(expected.gradients, sharded))
        norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), CLIP)
        yield from _same_number("gradient norm", whole(norm), expected.norm, tolerances.NORM)
        yield from (f"after clipping: {fault}" for fault in same_gradients(expected.clipped, sharded))


def compare_training(
    reference: Reference, sharded: nn.Module, mesh: DeviceMesh, batches: tuple[Batch, ...] = MICRO_BATCHES
) -> Iterator[str]:
    """Parameters after three clipped AdamW steps of two micro-batches each."""
    expected = reference.trained(batches)
    train(sharded, batches, mesh)
    yield from different_replicas({name: p.detach() for name, p in sharded.named_parameters()})
    differences = norms_of_differences(stored_parameters(sharded), expected)
    for name, parameter in expected.items():
        difference = differences[name]
        allowed = tolerances.PARAMETER * parameter.norm().item() + tolerances.PARAMETER_LR * LR * sqrt(
            parameter.numel()
        )
        if not difference <= allowed:
            yield f"{name} after 3 steps differs by {difference:.1e}, allowed {allowed:.1e}"


def train(model: nn.Module, batches: tuple[Batch, ...], mesh: DeviceMesh | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for number in range(3):
        optimizer.zero_grad()
        accumulate(model, batches, seed=10 * number, mesh=mesh, synchronises=number != 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def accumulate(
    model: nn.Module,
    batches: Sequence[Batch],
    seed: int,
    mesh: DeviceMesh | None = None,
    synchronises: bool = True,
) -> None:
    """The micro-batches, this rank's rows of them on a mesh; ``synchronises``: FSDP2 reduces all but the last, too."""
    for number, batch in enumerate(batches):
        inputs, targets = inputs_for(model, batch, seed + number)
        if mesh is not None:
            inputs, targets = {name: rows_of(value, mesh) for name, value in inputs.items()}, rows_of(targets, mesh)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(synchronises or number == len(batches) - 1)
        step(with_attention(model, batch), inputs, targets, weight=1 / len(batches))


# ---------------------------------------------------------------- comparisons


def same_gradients(reference: nn.Module | Mapping[str, Tensor], sharded: nn.Module) -> Iterator[str]:
    """Every gradient of the reference against the sharded one, and replicas against each other."""
    expected = gradients_of(reference) if isinstance(reference, nn.Module) else reference
    yield from different_replicas({name: p.grad for name, p in sharded.named_parameters() if p.grad is not None})
    found = {name: stored.gradient() for name, stored in stored_in(sharded).items() if name in expected}
    given = {name: gradient for name, gradient in found.items() if gradient is not None}
    yield from (f"gradient of {name} is missing" for name in expected if name not in given)
    differences = norms_of_differences(given, {name: expected[name] for name in given})
    total = sqrt(sum(gradient.norm().item() ** 2 for gradient in expected.values()))
    for name, difference in differences.items():
        wanted = expected[name]
        allowed = tolerances.GRADIENT * wanted.norm().item() + tolerances.GRADIENT_FLOOR * total
        if not difference <= allowed:
            yield f"gradient of {name} is off by {difference / (wanted.norm().item() + 1e-30):.1e} of its norm"


def norms_of_differences(sharded: Mapping[str, Stored], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Between whole tensors: each rank looks at its range of them, the squares are added, and copies count once."""
    device = next((tensor.device for tensor in expected.values()), torch.device("cpu"))
    squares = torch.zeros(len(expected), dtype=torch.float64, device=device)
    for number, (name, wanted) in enumerate(expected.items()):
        for part, (held, own) in zip(sharded[name].parts, sharded[name].beside(wanted), strict=True):
            squares[number] += (held - own).norm().double() ** 2 / copies_of(part)
    if dist.is_initialized():
        dist.all_reduce(squares)
    return dict(zip(expected, squares.sqrt().tolist(), strict=True))


def stored_in(model: nn.Module) -> dict[str, Stored]:
    """The parameters under the unsharded model's names, which to compare with it; of a model without a plan its own."""
    if applied_to(model) is not None:
        return stored_parameters(model)
    return {name: Stored(name, (parameter,)) for name, parameter in model.named_parameters()}


def different_replicas(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Tensors whose replicas are not bit-equal over a mesh axis on which they are replicated."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    mesh = next((tensor.device_mesh for tensor in sharded.values()), None)
    for axis in range(mesh.ndim if mesh else 0):
        copied = {name: t.to_local().detach() for name, t in sharded.items() if t.placements[axis] == Replicate()}
        if not mesh or not copied:
            continue
        own = torch.cat([local.contiguous().view(torch.uint8).flatten() for local in copied.values()])
        copies = [torch.empty_like(own) for _ in range(mesh.size(axis))]  # in one gather, not one a tensor
        dist.all_gather(copies, own, group=mesh.get_group(axis))
        sizes = [local.nbytes for local in copied.values()]
        for name, *parts in zip(copied, *(each.split(sizes) for each in copies), strict=True):
            if not all(torch.equal(parts[0], part) for part in parts):
                yield f"replicas of {name} differ over mesh axis {axis}"


def same_names(reference: nn.Module, sharded: nn.Module) -> Iterator[str]:
    expected = [name for name, _ in reference.named_parameters()]
    actual = list(stored_parameters(sharded))
    if expected != actual:
        yield f"parameters are {sorted(set(expected) ^ set(actual))} on one side only, or in another order"
    if dist.get_world_size() > 1 and not all(isinstance(p, DTensor) for p in sharded.parameters()):
        yield "a parameter is not a DTensor"


def same_logits(expected: Tensor, actual: Tensor) -> Iterator[str]:
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
