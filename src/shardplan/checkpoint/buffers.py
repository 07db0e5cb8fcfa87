"""Buffers that are in no checkpoint, such as rotary tables: transformers computes them anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from shardplan.apply import Applied
from shardplan.checkpoint.together import CheckpointError
from shardplan.checkpoint.unsharded import Unsharded
from shardplan.weights import some


def computed_buffers(model: nn.Module, applied: Applied, unsharded: Unsharded) -> dict[str, Tensor]:
    """Values of the buffers that are in no checkpoint, by name, those that transformers computes.

    Raises:
        CheckpointError: nobody knows what belongs into some that are on the meta device.
    """
    buffers = dict(_unsaved_buffers(model, applied))
    computed = dict(unsharded.unsaved_buffers(buffers))
    unknown = [name for name, buffer in buffers.items() if buffer.is_meta and name not in computed]
    if unknown:
        raise CheckpointError(
            f"buffers that are in no checkpoint, and that transformers does not compute: {some(unknown)}; "
            "build the model on a real device, or register them as persistent"
        )
    return computed


def fill_buffers(model: nn.Module, applied: Applied, computed: Mapping[str, Tensor]) -> None:
    """Copy what `computed_buffers` gave into the model, which has memory by now."""
    for name, buffer in _unsaved_buffers(model, applied):
        buffer.copy_(computed.get(name, buffer))


def _unsaved_buffers(model: nn.Module, applied: Applied) -> Iterator[tuple[str, Tensor]]:
    for compiled in applied.compiled.modules:
        module = applied.compiled.find(model, compiled.fqn)
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                yield f"{compiled.fqn}.{name}" if compiled.fqn else name, buffer
