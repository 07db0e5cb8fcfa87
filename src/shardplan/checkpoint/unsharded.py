"""The unsharded model of a sharded one, without weights: transformers converts names and tensors for it.

Its tables of conversions go by a model's class, and its operations ask the model for sizes. A sharded model has other
classes and other sizes, so a second one is built on the meta device from the same config.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardplan import _compat
from shardplan.apply import Applied
from shardplan.checkpoint.lazy import LazyTensor
from shardplan.checkpoint.together import CheckpointError


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint's tensors under the unsharded model's names and in its shapes; and what did not go into it."""

    tensors: Mapping[str, LazyTensor]
    unexpected: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


class Unsharded:
    """See above; of a model that is none of transformers' nothing is known, and nothing is converted."""

    def __init__(self, model: nn.Module, applied: Applied) -> None:
        from transformers import PreTrainedModel

        self._root: Any = applied.compiled.find(model, "")
        self._twin: Any = None
        if isinstance(self._root, PreTrainedModel):
            name = applied.compiled.by_fqn[""].class_name
            cls: Any = next(cls for cls in type(self._root).__mro__ if cls.__name__ == name)
            with torch.device("meta"):
                self._twin = cls(copy.deepcopy(self._root.config))

    def from_checkpoint(self, tensors: Mapping[str, LazyTensor]) -> Converted:
        """What a checkpoint holds, converted. Nothing is read."""
        if self._twin is None:
            return Converted(tensors)
        report = _compat.convert_for_model(self._twin, dict(tensors))
        own = {**dict(self._twin.named_parameters(remove_duplicate=False)), **dict(self._twin.named_buffers())}
        unfit = [f"{name} is {tuple(given)}, not {tuple(own)}" for name, given, own in sorted(report.mismatched_keys)]
        unfit += [f"{name} cannot be converted: {said.strip()}" for name, said in report.conversion_errors.items()]
        loaded = {name: tensor.data for name, tensor in own.items() if isinstance(tensor.data, LazyTensor)}
        return Converted(loaded, tuple(sorted(report.unexpected_keys)), tuple(unfit))

    def keep_conversions(self) -> None:
        """Have the sharded model remember what was converted, so that it is saved in the format that it came in."""
        if self._twin is not None:
            _compat.keep_conversions(self._twin, self._root)

    def to_checkpoint(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The other direction: of names that are tied one is given, and comes out under the name to save it by.

        Raises:
            CheckpointError: the model is not what its config says, so that nobody could read it.
        """
        if self._twin is None:
            return dict(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._twin.state_dict().items()}
        if other := [name for name, tensor in tensors.items() if shapes.get(name) != tuple(tensor.shape)]:
            raise CheckpointError(
                f"its config builds a model without these tensors, or with other shapes: {', '.join(other[:5])}"
            )
        _compat.keep_conversions(self._root, self._twin)
        ignored = self._twin._keys_to_ignore_on_save or ()
        kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
        return _compat.convert_for_checkpoint(self._twin, kept)  # type: ignore[arg-type,return-value]  # lazy, all of them

    def is_tied_to_another(self, name: str) -> bool:
        """Whether transformers leaves ``name`` out of a checkpoint, since it is tied to a tensor of another name."""
        return self._twin is not None and name in self._twin.all_tied_weights_keys

    def write_config(self, folder: Path) -> None:
        """Config, generation config and the code of a remote model, as transformers' `save_pretrained` has them."""
        if self._twin is None:
            return
        config = self._twin.config
        config.dtype = str(self._root.dtype).removeprefix("torch.")
        config.architectures = [type(self._twin).__name__]
        if self._twin.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(self._twin, folder, config=config)
        config.save_pretrained(folder)
        if self._twin.can_generate():
            self._root.generation_config.save_pretrained(folder)

    def unsaved_buffers(self, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Buffers that are in no checkpoint, such as rotary tables, computed on the CPU.

        Args:
            like: those of the sharded model by name: their shapes and dtypes.

        Yields:
            Those that transformers computes.
        """
        if self._twin is None:
            return
        computed = self._computed(like, flag=False)
        # Of the two values that a bool has neither says that nobody computed it; one that is kept whatever it is does.
        flags = {name: buffer for name, buffer in like.items() if buffer.dtype == torch.bool}
        again = self._computed(like, flag=True) if flags else {}
        for name, buffer in computed.items():
            if name in flags:
                known = torch.equal(buffer, again[name])
            else:
                known = not buffer.numel() or bool((buffer != _unset(buffer.dtype)).any())
            if known:
                yield name, buffer

    def _computed(self, like: Mapping[str, Tensor], *, flag: bool) -> dict[str, Tensor]:
        """What is in such buffers when transformers is done; ``flag`` is in those of bool before."""
        for name, buffer in like.items():
            path, _, own = name.rpartition(".")
            value = flag if buffer.dtype == torch.bool else _unset(buffer.dtype)
            self._twin.get_submodule(path)._buffers[own] = torch.full(buffer.shape, value, dtype=buffer.dtype)
        _compat.compute_unsaved_buffers(self._twin)
        return {name: self._twin.get_buffer(name) for name in like}


def _unset(dtype: torch.dtype) -> float:
    """What no computation gives."""
    fractional = dtype.is_floating_point or dtype.is_complex
    return torch.finfo(dtype).min if fractional else torch.iinfo(dtype).min
