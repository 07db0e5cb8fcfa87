"""Worker processes, kept alive for the whole run, on which tests run functions as the ranks of a gloo world.

    results = pool.run(2, parity.logits, "llama")  # parity.logits("llama") on ranks 0 and 1

The workers are forked from a server that has imported torch and transformers, so that nobody pays for the imports
twice, and the test process itself stays without threads. Every job gets a process group of its own, through a file
store of its own, which is destroyed afterwards: a world of 4 may follow a world of 1. Jobs that do the same things on
every rank and build meshes by `build_mesh` alone may follow each other in one world (``shared``): what DTensor has
found out about a layout, half of the time of a small job, then holds for the next one. After a failure the workers are
replaced, because what a failed job leaves behind is anybody's guess.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shardplan import _compat
from shardplan.mesh import parse_mesh
from shardplan.verify.ranks import RanksFailedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SIZE = 4
PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
]
GRACE_SECONDS = 5.0  # for the other ranks, once one has failed: they mostly wait for it in a collective


class PoolError(AssertionError):
    """A job that failed, died or hung on some rank; the message has what is known of every rank."""


@dataclass(frozen=True)
class _Outcome:
    """What a rank sends back: its result, or what went wrong. ``time`` is the machine's monotonic clock, in seconds."""

    ok: bool
    value: Any
    time: float


@dataclass(frozen=True)
class _Worker:
    process: Any  # multiprocessing.context.ForkServerProcess
    connection: Connection
    stacks: Path


class Pool:
    """``size`` worker processes, started by the first job and replaced after one that fails."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="shardplan-pool-")
        self._numbers = count()
        self._workers: list[_Worker] = []
        self._world = 0, ""  # of the last job where it was shared: its size and its store

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        shared: bool = False,
    ) -> list[Any]:
        """Call ``function(*args)`` as each rank of a gloo world of ``world_size``; return the results in rank order.

        Args:
            world_size: at most the size of the pool.
            function: a module-level function of an importable module; it finds its rank in ``torch.distributed``.
            args: picklable, as is what the function returns. Tensors travel by value.
            timeout: seconds until ranks that have not finished count as hanging.
            shared: in the world of the job before, where that was shared as well and had as many ranks.

        Raises:
            PoolError: a rank raised, died or did not finish.
        """
        assert 1 <= world_size <= self._size, f"a pool of {self._size} has no world of {world_size}"
        self._workers = self._workers or [self._start() for _ in range(self._size)]
        ranks = self._workers[:world_size]
        size, store = self._world
        if not shared or size != world_size:
            store = str(Path(self._folder.name) / f"store-{next(self._numbers)}")
        self._world = (world_size, store) if shared else (0, "")
        for rank, worker in enumerate(ranks):
            worker.connection.send_bytes(pickle.dumps((function, args, rank, world_size, store, shared)))
        outcomes = _collect(ranks, timeout)
        if all(outcome.ok for outcome in outcomes.values()) and len(outcomes) == world_size:
            return [outcomes[rank].value for rank in range(world_size)]
        report = _report(ranks, outcomes, timeout)
        self.kill()
        raise PoolError(report)

    def kill(self) -> None:
        """End the workers at once; the next job starts new ones."""
        self._world = 0, ""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []

    def close(self) -> None:
        """End the workers and remove the pool's files."""
        self.kill()
        self._folder.cleanup()

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        stacks = Path(self._folder.name) / f"stacks-{next(self._numbers)}"
        process = context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)


class LentRanks:
    """The pool where `--verify` expects `shardplan.verify.ranks.LocalRanks`: nobody pays for its imports again."""

    def __init__(self, pool: Pool, size: int) -> None:
        self.size = size
        self._pool = pool

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """
        Raises:
            RanksFailedError: as `LocalRanks` does.
        """
        try:
            return self._pool.run(size or self.size, function, *args, timeout=300.0)
        except PoolError as error:
            raise RanksFailedError(str(error)) from error

    def close(self) -> None:
        """Nothing: the pool goes on."""

    def __enter__(self) -> LentRanks:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _collect(ranks: Sequence[_Worker], timeout: float) -> dict[int, _Outcome]:
    """The outcome of each rank that finished, raised or died in time."""
    outcomes: dict[int, _Outcome] = {}
    pending = {worker.connection: rank for rank, worker in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while pending and (ready := wait(pending, max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                ranks[rank].process.join()
                died = f"died with exit code {ranks[rank].process.exitcode}"
                outcomes[rank] = _Outcome(False, died, time.monotonic())
            if not outcomes[rank].ok:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return outcomes


def _report(ranks: Sequence[_Worker], outcomes: dict[int, _Outcome], timeout: float) -> str:
    """What every rank did: the earliest failure first, then those still running, with their stacks."""
    failed = sorted((outcome.time, rank) for rank, outcome in outcomes.items() if not outcome.ok)
    running = [rank for rank in range(len(ranks)) if rank not in outcomes]
    finished = sorted(rank for rank, outcome in outcomes.items() if outcome.ok)
    stacks = {rank: _stacks(ranks[rank]) for rank in running}
    waited = f"{GRACE_SECONDS:g} s after that" if failed else f"after {timeout:g} s"
    parts = [f"rank {rank} {outcomes[rank].value}" for _, rank in failed]
    parts += [f"rank {rank} still ran {waited}:\n{stacks[rank]}" for rank in running]
    parts += [f"finished: ranks {finished}"] if finished else []
    return "\n\n".join(parts)


def _stacks(worker: _Worker) -> str:
    """Where the worker's threads are, as it writes on SIGUSR1; empty when it is too far gone even for that."""
    os.kill(worker.process.pid, signal.SIGUSR1)
    text, deadline = "", time.monotonic() + 5
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, text = text, worker.stacks.read_text()
        if text and text == before:
            break
    return text


def _serve(connection: Connection, stacks: str) -> None:
    """A worker's life: one job after another until the test process goes away."""
    import torch

    torch.set_num_threads(1)
    # Open for the life of the process: the handler writes to it from wherever the worker hangs.
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"), all_threads=True)  # noqa: SIM115
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve costs seconds
    _compat.dtensor_caches()  # before they are out of the collector's sight
    gc.collect()
    gc.freeze()  # what was imported stays: collecting after a job looks at the job's objects only
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        outcome = _perform(job)
        # Models and meshes are cycles, and keep their groups' threads alive until they are collected.
        gc.collect()
        connection.send_bytes(outcome)


def _perform(job: bytes) -> bytes:
    shared = False
    try:
        function, args, rank, world_size, store, shared = pickle.loads(job)
        _World.enter(rank, world_size, store)
        outcome = pickle.dumps(_Outcome(True, function(*args), time.monotonic()))
    except BaseException:  # noqa: BLE001 - whatever a test raises goes back to it; nothing is swallowed
        shared = False
        outcome = pickle.dumps(_Outcome(False, f"raised:\n{traceback.format_exc()}", time.monotonic()))
    if not shared:
        _World.leave()
    return outcome


class _World:
    """The world that a worker is in, and the meshes over it."""

    store = ""
    meshes: ClassVar[dict[str, DeviceMesh]] = {}

    @classmethod
    def enter(cls, rank: int, size: int, store: str) -> None:
        import torch.distributed as dist

        if store != cls.store:
            cls.leave()
            dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
            cls.store = store
        dist.barrier()  # a job that sends nothing would end its group while others still connect to it

    @classmethod
    def leave(cls) -> None:
        import torch.distributed as dist

        cls.store = ""
        cls.meshes.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        _compat.forget_meshes()


def build_mesh(text: str) -> DeviceMesh:
    """``dp=2,tp=2`` on the CPU; a worker of the pool gets the same one as long as it is in one world."""
    from torch.distributed.device_mesh import init_device_mesh

    if text in _World.meshes:
        return _World.meshes[text]
    names, sizes = zip(*parse_mesh(text).axes, strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if _World.store:
        _World.meshes[text] = mesh
    return mesh
