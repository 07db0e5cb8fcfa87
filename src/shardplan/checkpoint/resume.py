"""A checkpoint of a training run from disk, on any mesh and under any plan."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from shardplan.apply import required_of
from shardplan.checkpoint.buffers import computed_buffers, fill_buffers
from shardplan.checkpoint.load import refuse
from shardplan.checkpoint.marker import MARKER, PREFIX, Marker, PlanRecord, read_marker
from shardplan.checkpoint.memory import materialise
from shardplan.checkpoint.pieces import Pieces
from shardplan.checkpoint.state import (
    OTHERS,
    Blank,
    HasState,
    Trained,
    given,
    model_state,
    require_kind,
    restore_random_state,
)
from shardplan.checkpoint.together import CheckpointError, Ranks
from shardplan.checkpoint.unsharded import Unsharded
from shardplan.compiled import CompiledPlan

LOG = logging.getLogger("shardplan")
# The second where a process was killed on a file system that cannot exchange: see `put_in_place`.
NAMES = re.compile(rf"{PREFIX}([0-9]+)(\.previous)?")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        folder: that was read.
        step: that it was saved at.
        saved_mesh: that it was saved on.
        plan_changes: what the plan lays out or does otherwise than the one it was saved under; empty for the same.
        random_state: whether each rank has its random state again, which it has on the same mesh only.
    """

    folder: Path
    step: int
    saved_mesh: str
    plan_changes: tuple[str, ...]
    random_state: bool


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The finished checkpoint of the highest step in a folder that `save_checkpoint` wrote to; None without one.

    Only ``step-N`` counts, and ``step-N.previous`` where there is no finished ``step-N``.
    """
    finished = [marker.parent for marker in Path(folder).glob(f"{PREFIX}*/{MARKER}")]
    ordered = [(int(name[1]), name[2] is None, path) for path in finished if (name := NAMES.fullmatch(path.name))]
    return max(ordered)[-1] if ordered else None


@torch.no_grad()
def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: HasState | None = None,
) -> Resumed:
    """Read a checkpoint of a training run, on the mesh that wrote it or another, under its plan or another.

    Weights and optimizer state are bit-equal to those that were saved, however they are laid out now. A plan other than
    that of the checkpoint is said: in the result, and as a warning in the log ``shardplan`` of the first rank.

    Args:
        folder: one checkpoint, or the folder of all, of which the latest finished one is read.
        model: a model that `apply_plan` has sharded. On the meta device it gets memory; an optimizer can only be made,
            and read, after that. Every rank of the world calls.
        optimizer, scheduler: to be restored; what the checkpoint holds of them is passed over where they are None.

    Returns:
        What was read, and what is different.

    Raises:
        ValueError: no plan was applied to ``model``.
        CheckpointError: on every rank: no finished checkpoint is there, a file is missing or not whole, or it is that
            of another model or optimizer. What can be found out before reading is: nothing is touched then.
    """
    applied, ranks = required_of(model), Ranks.of_world()
    doing = f"cannot load a checkpoint from {folder}"
    with ranks.together(doing):
        found = _find(Path(folder))
        trained = Trained.of(model, optimizer) if optimizer is not None else None
        found.require("optimizer" if trained else None, "scheduler" if scheduler is not None else None)
        _require_same_tensors(model_state(model), found.metadata)
        computed = computed_buffers(model, applied, Unsharded(model, applied))
    ranks.require_same(given(optimizer, scheduler), doing, OTHERS)
    ranks.require_same(str(found.folder), doing, "ranks found different ones, but all must see one file system")
    group = ranks.groups[0] if ranks.groups else None
    saved: dict[str, Any] = {}  # objects, which are looked at before anything is touched
    if trained is not None:
        saved["optimizer"] = {"groups": (), "kind": ()}
    if scheduler is not None:
        saved["scheduler"] = {"state": (), "kind": ()}
    with ranks.together(doing):
        load(saved, checkpoint_id=found.folder, process_group=group, no_dist=group is None)
        for what, owner in (("optimizer", optimizer), ("scheduler", scheduler)):
            if owner is not None:
                require_kind(saved[what]["kind"][0], owner, what)
        groups = saved["optimizer"]["groups"][0] if trained is not None else []
        blank = trained.blank(found.metadata, groups) if trained is not None else {}
        if trained is not None:
            trained.require_alike(groups)
    # On another mesh a rank has another place, and ranks of one tp group would draw apart.
    same_mesh = found.marker.mesh == str(applied.compiled.mesh) and found.marker.world_size == ranks.size
    with ranks.together(doing):
        materialise(model, applied)
        fill_buffers(model, applied, computed)
        state: dict[str, Any] = {"model": model_state(model)}
        if same_mesh:
            state["random"] = {str(ranks.rank): ()}
        if trained is not None:
            state["optimizer"] = {"state": _pieces_of(blank)}
    with ranks.together(doing):
        load(state, checkpoint_id=found.folder, process_group=group, no_dist=group is None)
    with ranks.together(doing):
        if trained is not None:
            trained.restore_groups(groups)
            trained.restore(_filled(blank, state["optimizer"]["state"]))
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"]["state"][0])
        if same_mesh:
            restore_random_state(state["random"][str(ranks.rank)][0])
    changes = found.marker.plan.changes(PlanRecord.of(applied.compiled))
    if ranks.first:
        _say(found, applied.compiled, changes, same_mesh=same_mesh)
    return Resumed(found.folder, found.marker.step, found.marker.mesh, changes, same_mesh)


@dataclass(frozen=True, slots=True)
class _Found:
    """A finished checkpoint, of which nothing but its description was read."""

    folder: Path
    marker: Marker
    metadata: Metadata

    def require(self, *wanted: str | None) -> None:
        """
        Raises:
            CheckpointError: it was saved without something that is to be restored.
        """
        held = {path[0] for path in (self.metadata.planner_data or {}).values()}
        if lacking := [what for what in wanted if what is not None and what not in held]:
            raise CheckpointError(f"{self.folder} was saved without {' and '.join(lacking)}")


def _find(folder: Path) -> _Found:
    source = _finished(folder)
    return _Found(source, read_marker(source), FileSystemReader(source).read_metadata())


def _finished(folder: Path) -> Path:
    if (folder / MARKER).is_file() or NAMES.fullmatch(folder.name):
        return folder
    found = latest_checkpoint(folder)
    if found is None:
        raise CheckpointError("no finished checkpoint is there")
    return found


def _require_same_tensors(model: dict[str, Pieces], metadata: Metadata) -> None:
    entries = {
        path[1]: metadata.state_dict_metadata[flat]
        for flat, path in (metadata.planner_data or {}).items()
        if path[0] == "model"
    }
    saved = {name: about for name, about in entries.items() if isinstance(about, TensorStorageMetadata)}
    shapes = {name: tuple(pieces.shape) for name, pieces in model.items()}
    refuse({
        "missing": [name for name in shapes if name not in saved],
        "not in the model": [name for name in saved if name not in shapes],
        "of another dtype, and would be rounded": [
            f"{name} is {saved[name].properties.dtype}, not {pieces.dtype}"
            for name, pieces in model.items()
            if name in saved and torch.promote_types(saved[name].properties.dtype, pieces.dtype) != pieces.dtype
        ],
        "of another shape": [
            f"{name} is {tuple(saved[name].size)}, not {shape}"
            for name, shape in shapes.items()
            if name in saved and tuple(saved[name].size) != shape
        ],
    })  # fmt: skip


def _pieces_of(blank: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What torch.distributed.checkpoint reads into."""
    return {
        name: {key: value.pieces() if isinstance(value, Blank) else value for key, value in values.items()}
        for name, values in blank.items()
    }


def _filled(blank: dict[str, dict[str, Any]], read: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """``blank`` with what was not read in place."""
    return {
        name: {key: value if isinstance(value, Blank) else read[name][key] for key, value in values.items()}
        for name, values in blank.items()
    }


def _say(found: _Found, compiled: CompiledPlan, changes: tuple[str, ...], *, same_mesh: bool) -> None:
    source, marker = found.folder, found.marker
    if changes:
        LOG.warning(
            "%s was saved under plan '%s' and goes on under plan '%s', which is another: %s",
            source, marker.plan.name, compiled.name, "; ".join(changes),
        )  # fmt: skip
    if not same_mesh:
        LOG.warning(
            "%s was saved on %s (%d ranks) and goes on on %s: no rank has the random state that it had",
            source, marker.mesh, marker.world_size, compiled.mesh,
        )  # fmt: skip
