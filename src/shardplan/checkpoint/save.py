"""A sharded model into a folder that `from_pretrained` reads: tensor by tensor, file by file, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.apply import required_of
from shardplan.checkpoint.folder import INDEX, ONE_FILE, begin_on_all, beside, discard, put_in_place
from shardplan.checkpoint.lazy import Box, LazyTensor, Source, lazy, whole
from shardplan.checkpoint.progress import tracked
from shardplan.checkpoint.store import Saving
from shardplan.checkpoint.together import CheckpointError, LostRankError, Ranks, is_loss
from shardplan.checkpoint.unsharded import Unsharded
from shardplan.weights import by_identity, stored_tensors

MAX_SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def save_weights(model: nn.Module, folder: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a sharded model as a Hugging Face folder: safetensors, their index, config and generation config.

    `from_pretrained` in one process reads it back bit-equal, whatever the plan. Names and tensors are converted to the
    format that was loaded, or that transformers saves, by transformers' own tables. Tensors are gathered one at a time,
    and the ranks take turns in writing files: a rank holds one tensor in its device's memory beside its part, and one
    file in the host's.

    Args:
        model: a model that `apply_plan` has sharded. Every rank of its mesh calls.
        folder: on a file system that all ranks see. It is written as ``.NAME.partial`` beside, and takes its place when
            all of it is on disk: a process that is killed leaves what was there. Of an earlier folder weights and
            configs are replaced, and everything else is kept.
        max_shard_bytes: of one file; a larger tensor has a file of its own.

    Raises:
        ValueError: no plan was applied to ``model``.
        CheckpointError: on every rank: the folder cannot be written. What was there is as it was.
    """
    applied = required_of(model)
    ranks, folder = Ranks.of(model), Path(folder).resolve()
    partial, doing = beside(folder), f"cannot save weights to {folder}"
    Saving.end_of_last()  # which may be writing below the folder that is exchanged
    numbers = ranks.gather(ranks.rank, doing)
    try:
        with ranks.together(doing):
            unsharded = Unsharded(model, applied)
            tensors = unsharded.to_checkpoint(dict(_to_save(model, unsharded)))
            files = _files({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_bytes)
            _require_folder(folder)
        begin_on_all(partial, ranks, doing)
        writing = tracked(list(files.items()), f"saving {folder.name}", shown=ranks.first)
        for number, (file, names) in enumerate(writing):
            writes = numbers[number % len(numbers)] == ranks.rank
            gathered = {name: _gathered(tensors[name], doing, keep=writes) for name in names}
            with ranks.together(doing):
                if writes:
                    save_file(gathered, partial / file, metadata={"format": "pt"})
            del gathered
        with ranks.together(doing):
            if ranks.first:
                if len(files) > 1:
                    _write_index(files, tensors, partial)
                unsharded.write_config(partial)
                put_in_place(partial, folder, keep_others=True)
    except CheckpointError:
        if ranks.first:
            discard(partial)
        raise


def _require_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError("it is a file")
    if os.path.ismount(folder):
        raise CheckpointError("it is a mount point, which no other folder can take the place of: give a folder in it")


# ---------------------------------------------------------------- what is gathered


@dataclass
class _Last:
    """The tensor that was gathered last: many of a checkpoint may be made of one."""

    part: Tensor | None = None
    whole: Tensor | None = None

    def of(self, part: Tensor) -> Tensor:
        if self.part is not part or self.whole is None:
            self.part = self.whole = None  # before the next one takes memory
            self.part, self.whole = part, part.full_tensor() if isinstance(part, DTensor) else part
        return self.whole


@dataclass(frozen=True, slots=True)
class _Sharded(Source):
    """A tensor of the model; reading any part of it is a collective."""

    part: Tensor
    last: _Last = field(repr=False)

    def read_into(self, box: Box, out: Tensor) -> None:
        out.copy_(self.last.of(self.part)[box])


def _to_save(model: nn.Module, unsharded: Unsharded) -> Iterator[tuple[str, LazyTensor]]:
    """The unsharded model's tensors by name; of tied names the one that a checkpoint has."""
    last = _Last()
    for tied in by_identity(stored_tensors(model)):
        kept = next((entry for entry in tied if not unsharded.is_tied_to_another(entry.name)), tied[0])
        parts: list[Any] = [lazy(tuple(part.shape), part.dtype, _Sharded(part.detach(), last)) for part in kept.parts]
        joined: Any = torch.cat(parts, kept.dim) if len(parts) > 1 else parts[0]
        yield kept.name, joined


def _gathered(tensor: LazyTensor, doing: str, *, keep: bool) -> Tensor:
    """All ranks gather; those that do not keep it hold nothing afterwards."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if keep else "meta")
    try:
        tensor.read_into(whole(tensor.shape), out)
    except RuntimeError as error:
        if is_loss(error):
            raise LostRankError(doing) from error
        raise CheckpointError(f"{doing}: a tensor could not be gathered: {error}") from error
    return out


# ---------------------------------------------------------------- files


def _files(sizes: Mapping[str, int], largest: int) -> dict[str, list[str]]:
    """Names by file, in order; a file is full when the next tensor would make it too large."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    stem = ONE_FILE.removesuffix(".safetensors")
    return {f"{stem}-{number:05}-of-{len(groups):05}.safetensors": names for number, names in enumerate(groups, 1)}


def _write_index(files: Mapping[str, list[str]], tensors: Mapping[str, LazyTensor], partial: Path) -> None:
    weight_map = {name: file for file, names in files.items() for name in names}
    totals = {
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
    }
    content = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True)
    (partial / INDEX).write_text(content + "\n", encoding="utf-8")
