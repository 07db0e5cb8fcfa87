"""A sharded model's tensors under the names and in the row order of the unsharded one: out and in, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from shardplan.apply import required_of

MOST_NAMED = 20  # tensors of each kind that a message lists


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the unsharded model, and what a sharded one keeps for it: tensors side by side along ``dim``."""

    name: str
    parts: tuple[Tensor, ...]
    dim: int = 0

    def whole(self) -> Tensor:
        """Gathered, and a tensor of its own; every rank calls it."""
        return join(tuple(part.detach() for part in self.parts), self.dim)

    def gradient(self) -> Stored | None:
        """What is kept for its gradient; None where a part has none."""
        grads = tuple(part.grad for part in self.parts if part.grad is not None)
        return Stored(self.name, grads, self.dim) if len(grads) == len(self.parts) else None

    def beside(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What this rank holds of each part, beside the same range of ``whole``, a tensor of `shape`; nothing is sent.

        Either shares its memory.
        """
        lengths = [part.shape[self.dim] for part in self.parts] if len(self.parts) > 1 else None
        for part, there in zip(self.parts, whole.split(lengths, self.dim) if lengths else (whole,), strict=True):
            held, own = local(part), there[own_box(part)]
            assert held.shape == own.shape, f"{self.name}: a rank holds {tuple(held.shape)}, not {tuple(own.shape)}"
            yield held, own

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        shape = list(self.parts[0].shape)
        if len(self.parts) > 1:
            shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)


def stored_tensors(model: nn.Module) -> Iterator[Stored]:
    """Parameters and persistent buffers in the order of the unsharded model's ``state_dict()``; tied ones repeat.

    Raises:
        ValueError: no plan was applied to ``model``.
    """
    applied = required_of(model)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # after a forward without a backward it may hold gathered copies
    for compiled in applied.compiled.modules:
        module = applied.compiled.find(model, compiled.fqn)
        for parameter in compiled.parameters:
            parts = tuple(module.get_parameter(name) for name in parameter.stored_names)
            yield Stored(parameter.fqn, parts, parameter.placement.dim or 0)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield Stored(f"{compiled.fqn}.{name}" if compiled.fqn else name, (buffer,))


def by_identity(stored: Iterable[Stored]) -> list[list[Stored]]:
    """Tensors of the model, each with all the names that it goes by."""
    tied: dict[int, list[Stored]] = {}
    for entry in stored:
        tied.setdefault(id(entry.parts[0]), []).append(entry)
    return list(tied.values())


def stored_parameters(model: nn.Module) -> dict[str, Stored]:
    """The parameters among them, tied ones once, as ``named_parameters()`` of the unsharded model gives them."""
    first = (tied[0] for tied in by_identity(stored_tensors(model)))
    return {entry.name: entry for entry in first if isinstance(entry.parts[0], nn.Parameter)}


@torch.no_grad()
def hf_state_dict(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of ``model`` as the unsharded model has them, gathered one at a time.

    Packed parameters, which a sharded model keeps in sections, come out whole and in their own row order.

    Args:
        model: a model that `apply_plan` has sharded. Every rank iterates in step: each tensor is a collective.

    Yields:
        In the order of the unsharded model's ``state_dict()``, every name that is there, tied ones too, with a tensor
        on the model's device that shares no memory with it.

    Raises:
        ValueError: no plan was applied to ``model``.
    """
    for stored in stored_tensors(model):
        yield stored.name, stored.whole()


@torch.no_grad()
def load_hf_state_dict(model: nn.Module, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Copy whole tensors, named and ordered as in the unsharded model, into a sharded one; nothing is sent.

    Args:
        model: a model that `apply_plan` has sharded.
        tensors: by name, in any order, the same on every rank; or pairs, which are taken one at a time. Of names that
            are tied one is enough. Dtypes and devices are converted to the model's.

    Raises:
        ValueError: no plan was applied; names are missing or unknown, or shapes differ. Each is named. Of a mapping
            nothing is copied then, of pairs what came before.
    """
    stored = {entry.name: entry for entry in stored_tensors(model)}
    if isinstance(tensors, Mapping):
        _refuse(stored, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    seen: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        seen[name] = tuple(tensor.shape)
        entry = stored.get(name)
        if entry is not None and entry.shape == seen[name]:
            for held, own in entry.beside(tensor):
                held.copy_(own)
    _refuse(stored, seen)


def join(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    """The whole tensor of its parts, each gathered: a tensor of its own."""
    whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    return torch.cat(whole, dim) if len(whole) > 1 else whole[0].detach().clone()


def own_box(part: Tensor) -> tuple[slice, ...]:
    """The range along each dim that this rank holds of a tensor; all of one that is no DTensor.

    FSDP2 cuts what tp has cut already, so the axes are taken from the last to the first. A rank without a row holds an
    empty range.
    """
    held = [range(length) for length in part.shape]
    if isinstance(part, DTensor):
        for axis, placement in reversed(list(enumerate(part.placements))):
            if placement != Replicate():
                dim: int = placement.dim  # type: ignore[attr-defined]  # Shard's, and that of a strided one
                rank, chunk = part.device_mesh.get_local_rank(axis), -(-len(held[dim]) // part.device_mesh.size(axis))
                held[dim] = held[dim][rank * chunk : (rank + 1) * chunk]
    return tuple(slice(along.start, along.stop) for along in held)


def copies_of(part: Tensor) -> int:
    """How many ranks hold the same of a tensor as this one does."""
    if not isinstance(part, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    axes = [axis for axis, placement in enumerate(part.placements) if placement == Replicate()]
    return prod(part.device_mesh.size(axis) for axis in axes)


def local(part: Tensor) -> Tensor:
    """What this rank holds, as a plain tensor that shares its memory."""
    return part.to_local() if isinstance(part, DTensor) else part


def _refuse(stored: Mapping[str, Stored], given: Mapping[str, tuple[int, ...]]) -> None:
    present = {id(stored[name].parts[0]) for name in given if name in stored}
    missing = [name for name, entry in stored.items() if name not in given and id(entry.parts[0]) not in present]
    unknown = [name for name in given if name not in stored]
    misshapen = [
        f"{name} is {given[name]}, not {stored[name].shape}"
        for name in given
        if name in stored and given[name] != stored[name].shape
    ]
    if said := problems({"missing": missing, "not in the model": unknown, "of another shape": misshapen}):
        raise ValueError(f"these tensors are not the model's: {said}")


def problems(found: Mapping[str, Iterable[str]]) -> str:
    """What there is of each kind, in words; empty where nothing is."""
    listed = {what: list(names) for what, names in found.items()}
    return "; ".join(f"{what}: {some(names)}" for what, names in listed.items() if names)


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
