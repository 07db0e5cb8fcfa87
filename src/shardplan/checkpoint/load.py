"""A folder of safetensors into a sharded model: each rank reads its own part, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.apply import required_of
from shardplan.checkpoint.boxes import boxes
from shardplan.checkpoint.buffers import computed_buffers, fill_buffers
from shardplan.checkpoint.folder import open_weights
from shardplan.checkpoint.lazy import Box, LazyTensor, origins
from shardplan.checkpoint.memory import materialise
from shardplan.checkpoint.progress import tracked
from shardplan.checkpoint.together import CheckpointError, Ranks
from shardplan.checkpoint.unsharded import Unsharded
from shardplan.weights import Stored, by_identity, problems, stored_tensors

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is read into which tensors of the model."""

    stored: Stored
    tensor: LazyTensor


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Read the weights of a Hugging Face checkpoint into a sharded model, each rank its own part.

    No rank holds more than its part and one tensor of the checkpoint. What is on the meta device gets memory first.
    Tensors are cast to the dtypes of the model's parameters. Names and tensors that the checkpoint has otherwise than
    the model (fused experts and the like) are converted by transformers' own tables, and buffers that are in no
    checkpoint (rotary tables) are computed by transformers. `save_weights` later writes the format that was read.

    Args:
        model: a model that `apply_plan` has sharded, on the meta device or not. Every rank of its mesh calls.
        folder: with ``model.safetensors``, or several files and their index. A ``generation_config.json`` in it becomes
            the model's.

    Raises:
        ValueError: no plan was applied to ``model``.
        CheckpointError: on every rank, before anything of the model is touched: files that are missing or not whole;
            tensors that are missing, unknown, of another shape, or whole numbers where the model has fractions, all of
            them by name; tied ones that differ; a ``generation_config.json`` that is none.
    """
    applied = required_of(model)
    ranks, folder = Ranks.of(model), Path(folder)
    doing = f"cannot load weights from {folder}"
    with ranks.together(doing):
        unsharded = Unsharded(model, applied)
        readings = _match(list(stored_tensors(model)), unsharded, folder)
        computed = computed_buffers(model, applied, unsharded)
        root: Any = applied.compiled.find(model, "")
        generation = _generation_config(folder) if hasattr(root, "generation_config") else None
    with ranks.together(doing):
        materialise(model, applied)
        parts = {entry.name: entry for entry in stored_tensors(model)}
        for reading in tracked(readings, f"loading {folder.name}", shown=ranks.first):
            _fill(parts[reading.stored.name], reading.tensor)
        fill_buffers(model, applied, computed)
        unsharded.keep_conversions()
        if generation is not None:
            root.generation_config = generation


# ---------------------------------------------------------------- what goes where


def _match(stored: list[Stored], unsharded: Unsharded, folder: Path) -> list[_Reading]:
    """What is read into the model, each tensor of it once.

    Raises:
        CheckpointError: with all that does not fit.
    """
    converted = unsharded.from_checkpoint(open_weights(folder))
    names = {entry.name for entry in stored}
    unexpected = (*converted.unexpected, *sorted(converted.tensors.keys() - names))
    twins = by_identity(stored)
    misfits = [name.partition(" ")[0] for name in converted.unfit]
    missing = [
        " = ".join(entry.name for entry in tied)
        for tied in twins
        if not any(entry.name in converted.tensors or entry.name in misfits for entry in tied)
    ]
    misshapen = [
        f"{entry.name} is {tuple(converted.tensors[entry.name].shape)}, not {entry.shape}"
        for entry in stored
        if entry.name in converted.tensors and tuple(converted.tensors[entry.name].shape) != entry.shape
    ]
    refuse({
        "missing": missing,
        "not in the model": unexpected,
        "of another shape": (*converted.unfit, *misshapen),
        "of another kind": [said for entry in stored for said in _of_another_kind(entry, converted.tensors)],
    })  # fmt: skip
    given = [[entry for entry in tied if entry.name in converted.tensors] for tied in twins]
    refuse({"tied in the model, and different in the checkpoint": list(_different(given, converted.tensors))})
    return [_Reading(tied[0], converted.tensors[tied[0].name]) for tied in given]


def _of_another_kind(entry: Stored, tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Whole numbers where fractions belong, such as a quantised weight, or the other way: no cast makes these right."""
    wanted = entry.parts[0].dtype
    given = origins(tensors[entry.name]) if entry.name in tensors else ()
    for dtype in {tensor.dtype for tensor in given if _fractional(tensor.dtype) != _fractional(wanted)}:
        yield f"{entry.name} is {dtype}, not {wanted}"


def _fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _different(given: Iterable[list[Stored]], tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Ties whose tensors differ in this rank's part."""
    for first, *others in given:
        for other in others:
            one, two = tensors[first.name], tensors[other.name]
            if not all(torch.equal(_part(one, box), _part(two, box)) for box, _ in boxes(first.parts, first.dim)):
                yield f"{first.name} = {other.name} (with tie_word_embeddings=False in the config they are two)"


def _part(tensor: LazyTensor, box: Box) -> Tensor:
    out = torch.empty([along.stop - along.start for along in box], dtype=tensor.dtype)
    tensor.read_into(box, out)
    return out


def refuse(found: Mapping[str, Iterable[str]]) -> None:
    """Nothing, where nothing was found.

    Raises:
        CheckpointError: with the names of what there is of each kind.
    """
    if said := problems(found):
        raise CheckpointError(f"its tensors are not the model's; {said}")


# ---------------------------------------------------------------- reading


def _fill(stored: Stored, tensor: LazyTensor) -> None:
    for box, part in boxes(stored.parts, stored.dim):
        tensor.read_into(box, part)


def _generation_config(folder: Path) -> Any:
    """
    Raises:
        CheckpointError: there is one that is none.
    """
    if not (folder / GENERATION_CONFIG).is_file():
        return None
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{GENERATION_CONFIG} cannot be read: {error}") from error
