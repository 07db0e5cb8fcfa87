"""A checkpoint of a training run onto disk: whole or not at all, and in the background where asked."""

from __future__ import annotations

import copy
import logging
import threading
from operator import index
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardplan.apply import required_of
from shardplan.checkpoint.folder import begin_on_all, beside, discard, put_in_place
from shardplan.checkpoint.marker import MARKER, PREFIX, Marker, PlanRecord, files_of
from shardplan.checkpoint.state import (
    OTHERS,
    HasState,
    Trained,
    copied_to_host,
    given,
    itself,
    kind_of,
    mark_of,
    model_state,
    random_state,
)
from shardplan.checkpoint.together import CheckpointError, Ranks

LOG = logging.getLogger("shardplan")


class Saving:
    """A checkpoint that is being written."""

    _last: ClassVar[Saving | None] = None  # of this process

    def __init__(self, folder: Path, write: Any, group: dist.ProcessGroup | None) -> None:
        self.folder = folder
        self._error: CheckpointError | None = None
        self._write = write
        self._group = group
        self._thread = threading.Thread(target=self._run, name=f"saving {folder.name}")
        self._thread.start()
        Saving._last = self

    def _run(self) -> None:
        try:
            self._write()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            ended = "" if dist.is_initialized() or self._group is None else "; wait() before destroy_process_group()"
            self._error = CheckpointError(f"cannot save the checkpoint {self.folder}: {error!r}{ended}")
        if self._error is not None:  # nobody may ask, and the process end as if all were well
            LOG.error("%s", self._error)

    @classmethod
    def end_of_last(cls) -> None:
        """Wait for the one before: two at once would write into each other's folders.

        Raises:
            CheckpointError: it could not be written, and nobody has asked.
        """
        last, cls._last = cls._last, None
        if last is not None:
            last.wait()

    @property
    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when it is on disk and in its place. Every rank calls it, and the next save does so itself.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """
        self._thread.join()
        if Saving._last is self:
            Saving._last = None
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None
        if self._error is not None:
            raise self._error


@torch.no_grad()
def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scheduler: HasState | None = None,
    asynchronous: bool = False,
) -> Saving | None:
    """Write a checkpoint of a training run as ``FOLDER/step-NNNNNNNN``, through `torch.distributed.checkpoint`.

    It holds the model, the optimizer's state and hyperparameters, the scheduler's state, each rank's random state
    (Python, NumPy, torch, CUDA), ``step``, and the plan and the mesh. Tensors have the names and the shapes of the
    unsharded model.

    Args:
        folder: of all checkpoints of the run, on a file system that all ranks see.
        model: a model that `apply_plan` has sharded. Every rank of the world calls.
        optimizer: over parameters of ``model``; state must be of a parameter's shape or one number.
        step: a number for this checkpoint, from 0 on; one of the same number is replaced.
        scheduler: or anything else with ``state_dict()`` and ``load_state_dict()``, the same on every rank.
        asynchronous: return as soon as a copy of this rank's part is in the host's memory, and write in the background,
            on a gloo group of its own.

    Returns:
        Where ``asynchronous``, the saving: its ``wait()`` raises what went wrong.

    Raises:
        ValueError: no plan was applied to ``model``, or ``step`` is below 0.
        TypeError: ``step`` is no whole number.
        CheckpointError: on every rank: it could not be written. Earlier checkpoints are as they were.
    """
    applied, step = required_of(model), _counted(step)
    ranks, target = Ranks.of_world(), Path(folder).resolve() / f"{PREFIX}{step:08}"
    doing, partial = f"cannot save the checkpoint {target}", beside(target)
    Saving.end_of_last()
    with ranks.together(doing):
        values = copied_to_host if asynchronous else itself
        if target.exists() and not (target / MARKER).is_file():
            raise CheckpointError("something else is there, which is not replaced")
        state = _state(model, optimizer, scheduler, ranks.rank, values)
        mark = mark_of(state.get("scheduler"))
    ranks.require_same(given(optimizer, scheduler), doing, OTHERS)
    problem = "the scheduler's state differs between ranks, and one of them would be saved for all (hashes)"
    ranks.require_same(mark, doing, problem)
    with ranks.together(doing):
        if ranks.first:
            _clear(target.parent)
    begin_on_all(partial, ranks, doing)
    marker = Marker(step, str(applied.compiled.mesh), ranks.size, PlanRecord.of(applied.compiled), {})
    if not asynchronous:
        _write(state, marker, target, ranks)
        return None
    group = dist.new_group(backend="gloo") if ranks.groups else None
    own = Ranks([group] if group is not None else [])
    return Saving(target, lambda: _write(state, marker, target, own), group)


def _clear(folder: Path) -> None:
    """Remove what saves that were killed have left, of whichever step: none is under way now.

    But what is whole, and was only not put in its place.
    """
    for left in folder.glob(f".{PREFIX}*.partial"):
        if not (left / MARKER).is_file():
            discard(left)


def _counted(step: int) -> int:
    step = index(step)
    if step < 0:
        raise ValueError(f"step is {step}: checkpoints are numbered from 0 on")
    return step


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: HasState | None, rank: int, values: Any
) -> dict[str, Any]:
    """What torch.distributed.checkpoint is given: it goes through mappings and lists, and takes a tuple as it is."""
    state: dict[str, Any] = {"model": model_state(model, values), "random": {str(rank): (random_state(),)}}
    if optimizer is not None:
        trained = Trained.of(model, optimizer)
        state["optimizer"] = {
            "state": trained.state(values),
            "groups": (trained.groups(),),
            "kind": (kind_of(optimizer),),
        }
    if scheduler is not None:
        state["scheduler"] = {"state": (copy.deepcopy(scheduler.state_dict()),), "kind": (kind_of(scheduler),)}
    return state


def _write(state: dict[str, Any], marker: Marker, target: Path, ranks: Ranks) -> None:
    doing, partial = f"cannot save the checkpoint {target}", beside(target)
    group = ranks.groups[0] if ranks.groups else None
    try:
        with ranks.together(doing):
            # Its own collectives end in the same exception on every rank.
            save(state, storage_writer=_Writer(partial), process_group=group, no_dist=group is None)
        with ranks.together(doing):
            if ranks.first:
                Marker(marker.step, marker.mesh, marker.world_size, marker.plan, files_of(partial)).write(partial)
                put_in_place(partial, target)
    except CheckpointError:
        if ranks.first:
            discard(partial)
        raise


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """torch 2.13: closing a file on a full disk raises `unexpected pos`, and hides that the disk is full."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            hidden = error.__context__
            while hidden is not None and not isinstance(hidden, OSError):
                hidden = hidden.__context__
            raise hidden or error from error
