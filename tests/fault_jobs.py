"""What ranks do in tests of what goes wrong with files: the message that each gets, and how long it took."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR, StepLR

import checkpoint_jobs
import tiny_models
from pool import build_mesh
from shardplan import CheckpointError, apply_plan, load_checkpoint, load_weights, save_checkpoint, save_weights
from shardplan.checkpoint import folder as folders
from shardplan.checkpoint import save as saves
from shardplan.checkpoint import store as stores
from shardplan.weights import local

NAME, MESH = "llama", "dp=2,tp=2"
FILES = 30_000  # bytes of one: some of several files for each rank
NOBODY = 65534
SMALLEST_LIMIT = 8192  # bytes that a file may have where no small disk can be mounted

Said = tuple[str, float]  # the message, and the seconds until it came


def said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Said:
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except CheckpointError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


# ---------------------------------------------------------------- reading


def of_weights(source: str, fault: str = "", name: str = NAME) -> tuple[Said, bool]:
    """Of loading a folder; and whether the model was left untouched, on the meta device. ``fault``: on rank 1 alone."""
    model = checkpoint_jobs.meta_model(name, build_mesh(MESH))
    with on_rank_1(fault):
        message = said(load_weights, model, source)
    return message, all(parameter.is_meta for parameter in model.parameters())


@contextmanager
def on_rank_1(fault: str) -> Iterator[None]:
    if not fault or dist.get_rank() != 1:
        yield
        return
    owner: Any = folders._InFile if fault == "read_into" else folders
    with mock.patch.object(owner, fault, side_effect=OSError(5, "Input/output error", "the disk")):
        yield


def of_checkpoint(source: str) -> Said:
    model = checkpoint_jobs.meta_model(NAME, build_mesh(MESH))
    return said(load_checkpoint, source, model)


# ---------------------------------------------------------------- writing


def written(target: str, number: int, steps: tuple[int, ...] = ()) -> None:
    """Weights of the given number, or checkpoints of such."""
    model = of_number(number)
    if not steps:
        save_weights(model, target, max_shard_bytes=FILES)
    for step in steps:
        save_checkpoint(target, model, step=step)


def of_number(number: int) -> nn.Module:
    """A sharded model all of whose parameters are ``number``."""
    model = tiny_models.build(NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return apply_plan(model, tiny_models.plan_of(NAME), build_mesh(MESH))


def into(target: str, what: str, limited: bool = False, user: int | None = None) -> Said:
    """Of writing ``weights``, a ``checkpoint``, or one in the background, to where there is no room or no right."""
    model = of_number(2)
    with as_user(user), files_limited(limited):
        if what == "weights":
            return said(save_weights, model, target, max_shard_bytes=FILES)
        return said(save_and_wait, target, model, asynchronous=what == "background")


def numbers_in(target: str) -> set[float]:
    """The values of all parameters in the latest checkpoint."""
    model = of_number(4)
    load_checkpoint(target, model)
    return {value for tensor in model.parameters() for value in local(tensor.detach()).unique().tolist()}


class Unwritable:
    """A scheduler whose state cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: None}


def with_schedulers_of_their_own(target: str) -> dict[str, Said]:
    """Of saving and loading what is not the same on every rank, and what cannot be saved."""
    model, first = of_number(2), dist.get_rank() == 0
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = StepLR(optimizer, step_size=dist.get_rank() + 1)
    told = {
        "state": said(save_checkpoint, target, model, step=1, scheduler=scheduler),
        "one saves": said(save_checkpoint, target, model, optimizer if first else None, step=1),
        "unwritable": said(save_checkpoint, target, model, step=1, scheduler=Unwritable()),
    }
    save_checkpoint(f"{target}-whole", model, optimizer, step=1)
    told["one loads"] = said(load_checkpoint, f"{target}-whole", model, optimizer if first else None)
    return told


def both_at_once(target: str) -> list[str]:
    """What comes first: the end of a slow save in the background, or the beginning of weights around it."""
    model, order = of_number(2), []
    write, begin = stores._write, saves.begin_on_all

    def later(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)
        order.append("checkpoint")

    def begun(*args: Any) -> None:
        order.append("weights")
        begin(*args)

    with mock.patch.object(stores, "_write", later), mock.patch.object(saves, "begin_on_all", begun):
        saving = save_checkpoint(f"{target}/run", model, step=1, asynchronous=True)
        save_weights(model, target)
    assert saving is not None
    saving.wait()
    return order


def into_a_mount_point(target: str) -> Said:
    model = of_number(2)
    with mock.patch("os.path.ismount", lambda path: str(path) == target):
        return said(save_weights, model, target)


def save_and_wait(target: str, model: nn.Module, *, asynchronous: bool) -> None:
    saving = save_checkpoint(target, model, step=9, asynchronous=asynchronous)
    if saving is not None:
        saving.wait()


def twice_at_once(target: str) -> list[set[float]]:
    """Values in the checkpoint after each of two saves at one step, of which the second begins while one writes."""
    first, second = of_number(1), of_number(2)
    reader = of_number(3)
    seen = []
    saving = save_checkpoint(target, first, step=1, asynchronous=True)
    again = save_checkpoint(target, second, step=1, asynchronous=True)
    for each in (again, saving):
        assert each is not None
        each.wait()
        load_checkpoint(target, reader)
        seen.append({value for tensor in reader.parameters() for value in local(tensor.detach()).unique().tolist()})
    return seen


def ended_too_early(target: str) -> tuple[Said, list[str]]:
    """Of a save in the background whose process group goes before it begins to write; and what the log says."""
    model, go = of_number(1), threading.Event()
    written = stores._write

    def later(*args: Any) -> None:
        go.wait()
        written(*args)

    with checkpoint_jobs.logged() as messages, mock.patch.object(stores, "_write", later):
        saving = save_checkpoint(target, model, step=1, asynchronous=True)
        assert saving is not None
        gone = ValueError("Invalid process group specified")
        with (
            mock.patch.object(dist, "all_gather_object", side_effect=gone),
            mock.patch.object(dist, "is_initialized", return_value=False),
        ):
            go.set()
            told = said(saving.wait)
    return told, messages


def refused_before_reading(target: str) -> tuple[dict[str, Said], set[float]]:
    """Checkpoints of ones: messages for what does not fit to them, and the values that the models have then."""
    model = of_number(1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    save_checkpoint(target, model, step=1)
    save_checkpoint(f"{target}-half", model.to(torch.float16), step=1)
    save_checkpoint(target, model, optimizer, step=2, scheduler=scheduler)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))  # torch pickles where a tensor lies
    scheduler = in_turns(optimizer, CosineAnnealingLR)
    save_checkpoint(f"{target}-two", model.to(torch.float32), optimizer, step=1, scheduler=scheduler)
    other, rounding = of_number(2), of_number(2).to(torch.bfloat16)
    parameters = list(other.parameters())
    same, some = torch.optim.SGD(parameters), torch.optim.SGD(parameters[1:])
    groups = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}])
    told = {
        "groups": said(load_checkpoint, target, other, groups),
        "optimizer": said(load_checkpoint, target, other, torch.optim.AdamW(parameters)),
        "scheduler": said(load_checkpoint, target, other, same, scheduler=ExponentialLR(same, 0.5)),
        "schedulers": said(load_checkpoint, f"{target}-two", other, same, scheduler=in_turns(same, ExponentialLR)),
        "fewer": said(load_checkpoint, target, other, some),
        "without": said(load_checkpoint, f"{target}/step-00000001", other, same, scheduler=scheduler),
        "half": said(load_checkpoint, f"{target}-half", rounding),
        "rank": said(load_checkpoint, target if dist.get_rank() else f"{target}/step-00000001", other),
    }
    return told, {v for m in (other, rounding) for t in m.parameters() for v in local(t.detach()).unique().tolist()}


def in_turns(optimizer: torch.optim.Optimizer, second: Any) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer), second(optimizer, 2)], [3])


def not_one_folder(target: str, how: str) -> list[Said]:
    """Of writing weights and a checkpoint where the last rank has another ``folder``, ``step`` or ``disk``."""
    model, last = of_number(2), dist.get_rank() == 3
    folder = f"{target}-other" if how == "folder" and last else target
    told = []
    with another_disk(how == "disk" and last):
        if how != "step":
            told.append(said(save_weights, model, folder))
        told.append(said(save_checkpoint, folder, model, step=2 if how == "step" and last else 1))
    return told


@contextmanager
def another_disk(there: bool) -> Iterator[None]:
    """A folder of the same name on it, but nothing that others put into theirs."""
    if not there:
        yield
        return
    with mock.patch.object(Path, "exists", lambda path: not path.parent.name.endswith(".partial") and path.is_dir()):
        yield


@contextmanager
def as_user(user: int | None) -> Iterator[None]:
    """Root may write anywhere."""
    if user is None:
        yield
        return
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def files_limited(limited: bool) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALLEST_LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------- a process that is killed


def killed(target: str, what: str, moment: str, messages: str) -> None:
    """Rank 1, or rank 0 where it alone acts, is killed while it saves; the others leave what they were told."""
    model = of_number(2)
    with kill_at(moment):
        if what == "weights":
            message = said(save_weights, model, target, max_shard_bytes=FILES)
        else:
            message = said(save_and_wait, target, model, asynchronous=what == "background")
    (Path(messages) / str(dist.get_rank())).write_text(f"{message[1]} {message[0]}", encoding="utf-8")


@contextmanager
def kill_at(moment: str) -> Iterator[None]:
    if dist.get_rank() != (1 if moment == "file" else 0):
        yield
        return
    places: dict[str, tuple[Any, str]] = {
        "file": (saves, "save_file"),
        "before": (folders, "_exchange"),
        "after": (folders, "_exchange"),
    }
    owner, name = places[moment]
    original = getattr(owner, name)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        if moment == "after":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        mock.patch.object(owner, name, fatal),
        mock.patch.object(torch, "save", fatal if moment == "file" else torch.save),
    ):
        yield
