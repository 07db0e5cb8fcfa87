"""What a checkpoint of a training run holds, under names that know nothing of the plan or the mesh."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardplan.checkpoint.boxes import boxes
from shardplan.checkpoint.pieces import Pieces
from shardplan.checkpoint.together import CheckpointError
from shardplan.weights import Stored, by_identity, local, stored_tensors

OTHERS = "ranks were given other optimizers or schedulers than others"
Values = Callable[[Tensor], Tensor]  # what is saved of a rank's values: themselves, or a copy that stays as it is


class HasState(Protocol):
    """A learning-rate scheduler, or whatever else is to be saved along with it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def itself(values: Tensor) -> Tensor:
    return values


def copied_to_host(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)


def given(optimizer: object | None, scheduler: object | None) -> str:
    """What is saved or restored beside the model, in words."""
    owners = {"optimizer": optimizer, "scheduler": scheduler}
    return ", ".join(f"{what} {kind_of(owner)}" for what, owner in owners.items() if owner is not None) or "neither"


def mark_of(state: object) -> str:
    """The same for states that are equal, on whichever rank."""
    written = io.BytesIO()
    _ByValue(written).dump(state)
    return hashlib.sha256(written.getvalue()).hexdigest()[:8]


class _ByValue(pickle.Pickler):
    """Tensors by what is in them: torch pickles where they lie."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return list, (value.detach().flatten().tolist(),)
        return NotImplemented


def kind_of(owner: object) -> str:
    """The class of an optimizer or a scheduler, with those that one is made of: its state means nothing to another."""
    inner: Sequence[object] = getattr(owner, "_schedulers", ())  # torch's SequentialLR and ChainedScheduler
    return type(owner).__qualname__ + (f"({', '.join(map(kind_of, inner))})" if inner else "")


def require_kind(saved: str, owner: object, what: str) -> None:
    """
    Raises:
        CheckpointError: the state that was saved is that of another class.
    """
    if saved != kind_of(owner):
        raise CheckpointError(f"it holds the state of {saved}, and the {what} is {kind_of(owner)}")


def model_state(model: nn.Module, values: Values = itself) -> dict[str, Pieces]:
    """Parameters and persistent buffers by name, tied ones once; this rank's pieces of them."""
    kept = (tied[0] for tied in by_identity(stored_tensors(model)))
    return {entry.name: _pieces(entry, entry.parts, values) for entry in kept}


def _pieces(entry: Stored, parts: Iterable[Tensor], values: Values = itself) -> Pieces:
    parts = tuple(part.detach() for part in parts)
    return Pieces(entry.shape, parts[0].dtype, [(box, values(own)) for box, own in boxes(parts, entry.dim)])


# ---------------------------------------------------------------- optimizers


@dataclass(frozen=True, slots=True)
class Trained:
    """The parameters of an optimizer under the unsharded model's names, and the group of each."""

    optimizer: torch.optim.Optimizer
    stored: Mapping[str, Stored]
    group_of: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        """
        Raises:
            CheckpointError: it has parameters that are not the model's (any more), or that have no memory.
        """
        group_of_part = {
            id(part): number for number, group in enumerate(optimizer.param_groups) for part in group["params"]
        }
        if any(local(part).is_meta for group in optimizer.param_groups for part in group["params"]):
            raise CheckpointError(
                "the optimizer's parameters are on the meta device: load the weights first, then make the optimizer"
            )
        stored: dict[str, Stored] = {}
        group_of: dict[str, int] = {}
        for tied in by_identity(stored_tensors(model)):
            groups = {group_of_part.pop(id(part), None) for part in tied[0].parts}
            if groups == {None}:
                continue
            if len(groups) > 1:
                raise CheckpointError(f"the sections of {tied[0].name} are in different groups of the optimizer")
            stored[tied[0].name] = tied[0]
            group_of[tied[0].name] = next(group for group in groups if group is not None)
        if group_of_part:
            raise CheckpointError(
                f"{len(group_of_part)} of the optimizer's parameters are not the model's: "
                "make it after apply_plan, and after load_weights where the model was on the meta device"
            )
        return cls(optimizer, stored, group_of)

    def state(self, values: Values = itself) -> dict[str, dict[str, Any]]:
        """
        Raises:
            CheckpointError: a state is neither of its parameter's shape nor one number, so that nobody can reshard it.
        """
        return {name: dict(self._state_of(entry, values)) for name, entry in self.stored.items()}

    def _state_of(self, entry: Stored, values: Values) -> Iterator[tuple[str, Any]]:
        own = [self.optimizer.state.get(part, {}) for part in entry.parts]
        for key, first in own[0].items():
            if isinstance(first, Tensor) and first.shape == entry.parts[0].shape:
                yield key, _pieces(entry, [state[key] for state in own], values)
            elif not isinstance(first, Tensor) or first.ndim == 0:
                yield key, copied_to_host(first) if isinstance(first, Tensor) else (first,)
            else:
                raise CheckpointError(
                    f"the optimizer's {key} of {entry.name} has shape {tuple(first.shape)}, neither the parameter's "
                    "nor that of one number: it cannot be saved apart from the mesh"
                )

    def groups(self) -> list[dict[str, Any]]:
        """Hyperparameters of each group, with the names of its parameters."""
        return [
            {**{key: _plain(value) for key, value in group.items() if key != "params"}, "params": self._names(number)}
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    def _names(self, group: int) -> list[str]:
        return [name for name, number in self.group_of.items() if number == group]

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put in place what was read into a `blank` state."""
        self.optimizer.state.clear()
        for name, values in state.items():
            for number, part in enumerate(self.stored[name].parts):
                self.optimizer.state[part] = {key: _for_part(value, number) for key, value in values.items()}

    def require_alike(self, saved: list[dict[str, Any]]) -> None:
        """
        Raises:
            CheckpointError: the optimizer's groups are of other parameters.
        """
        if [set(group["params"]) for group in saved] != [set(self._names(n)) for n in range(len(self.groups()))]:
            raise CheckpointError("the optimizer's groups hold other parameters than those of the checkpoint")

    def restore_groups(self, saved: list[dict[str, Any]]) -> None:
        """After `require_alike`."""
        for group, values in zip(self.optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                elif key != "params":
                    group[key] = value

    def blank(self, metadata: Metadata, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Memory for the state that a checkpoint has: what `state` gives, without values.

        Args:
            groups: those that were saved.

        Raises:
            CheckpointError: it is that of other parameters.
        """
        saved: dict[str, dict[str, Any]] = {}
        weights: dict[str, torch.dtype] = {}
        for flat, path in (metadata.planner_data or {}).items():
            about = metadata.state_dict_metadata[flat]
            if path[:2] == ("optimizer", "state"):
                saved.setdefault(path[2], {})[path[3]] = about
            elif path[0] == "model" and isinstance(about, TensorStorageMetadata):
                weights[path[1]] = about.properties.dtype
        if unknown := sorted(saved.keys() - self.stored.keys()):
            raise CheckpointError(f"it has optimizer state of what the optimizer does not train: {', '.join(unknown)}")
        group_of = {name: group for group in groups for name in group["params"]}
        return {
            name: {
                key: _blank_of(self.stored[name], key, about, weights.get(name), group_of.get(name, {}))
                for key, about in keys.items()
            }
            for name, keys in saved.items()
        }


@dataclass(frozen=True, slots=True)
class Blank:
    """State of a parameter's shape, laid out like it."""

    entry: Stored
    parts: tuple[Tensor, ...]

    def pieces(self) -> Pieces:
        return _pieces(self.entry, self.parts)


def _blank_of(entry: Stored, key: str, about: Any, weight: torch.dtype | None, group: Mapping[str, Any]) -> Any:
    """
    Args:
        about: what the checkpoint says of it.
        weight: the dtype that the parameter was saved in; state in that dtype follows the parameter's.
        group: the parameter's, as it was saved and will be.
    """
    if not isinstance(about, TensorStorageMetadata):
        return ()
    dtype = about.properties.dtype
    if about.size == torch.Size(entry.shape):
        dtype = entry.parts[0].dtype if dtype == weight else dtype
        return Blank(entry, tuple(torch.zeros_like(part, dtype=dtype, requires_grad=False) for part in entry.parts))
    # As torch 2.13's own Optimizer.load_state_dict has it: a step counter lies where its kernel wants it.
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return torch.zeros((), dtype=dtype, device=local(entry.parts[0]).device if on_device else "cpu")


def _for_part(value: Any, number: int) -> Any:
    if isinstance(value, Blank):
        return value.parts[number]
    if isinstance(value, Tensor):
        return value.clone()  # each section counts its own steps
    return value[0]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------- random numbers


def random_state() -> dict[str, Any]:
    """Of Python, torch, CUDA's current device, and NumPy where it is in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": bytes(torch.get_rng_state().tolist())}
    if torch.cuda.is_available():
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set what `random_state` gave."""
    random.setstate(state["python"])
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])


def _bytes(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
