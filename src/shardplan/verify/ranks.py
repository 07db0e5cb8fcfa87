"""Local processes that run functions as the ranks of a gloo world: forked, once the imports are done, and kept.

A process of its own imports torch and transformers and then forks the ranks, so that nobody pays for the imports twice
and no rank inherits threads from a caller, who may have trained a model by then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

GRACE_SECONDS = 5.0  # for the other ranks, once one has failed: they mostly wait for it in a collective


class RanksFailedError(RuntimeError):
    """A rank raised, died, or did not finish; the message says which."""


class Ranks(Protocol):
    """What a proof runs on."""

    @property
    def size(self) -> int:
        """How many there are."""

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """As `LocalRanks.run`."""


class LocalRanks:
    """``size`` processes, started at once and in the background. Use it as a context manager, or `close` it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="shardplan-ranks-")
        self._numbers = count()
        self._start()

    def run(
        self, function: Callable[..., Any], *args: Any, size: int | None = None, timeout: float = 300.0
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank of a fresh gloo world; the results in rank order.

        Args:
            size: of the world; None takes all processes.
            function: a module-level function of an importable module.
            args: picklable, as is what the function returns.
            timeout: seconds until ranks that have not finished count as hanging.

        Raises:
            RanksFailedError: a rank raised, died or hangs. The ranks are then replaced.
        """
        store = str(Path(self._folder.name) / f"store-{next(self._numbers)}")
        job = pickle.dumps((function, args))
        ranks = self._connections[:size]
        for rank, connection in enumerate(ranks):
            connection.send((job, rank, len(ranks), store))
        results, problems = self._collect(ranks, timeout)
        if problems:
            self._stop()
            self._start()
            raise RanksFailedError("; ".join(problems))
        return [results[rank] for rank in range(len(ranks))]

    def _collect(self, ranks: list[Connection], timeout: float) -> tuple[dict[int, Any], list[str]]:
        results: dict[int, Any] = {}
        problems: list[str] = []
        pending = {connection: rank for rank, connection in enumerate(ranks)}
        deadline = time.monotonic() + timeout
        while pending and (ready := wait(pending, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    ok, value = False, "died"
                if ok:
                    results[rank] = value
                else:
                    problems.append(f"rank {rank} {value}")
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        problems += [f"rank {rank} did not finish" for rank in pending.values()]
        return results, problems

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self.size)]
        theirs = [pair[1].fileno() for pair in pairs]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # classes are found as they are here
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve costs seconds
        command = [sys.executable, "-c", "from shardplan.verify.ranks import serve; serve()", *map(str, theirs)]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=theirs, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self._connections = []
        for ours, their in pairs:
            their.close()
            self._connections.append(Connection(ours.detach()))

    def _stop(self) -> None:
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the processes and remove their files."""
        self._stop()
        self._folder.cleanup()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


# ---------------------------------------------------------------- in the processes


def serve() -> None:
    """Import what every rank needs, fork the ranks, and wait for them. Arguments are file descriptors, one a rank."""
    import shardplan.verify.compare  # noqa: F401 - before the fork

    descriptors = [int(argument) for argument in sys.argv[1:]]
    for own in descriptors:
        if os.fork() == 0:
            for other in descriptors:
                if other != own:
                    os.close(other)
            _work(Connection(own))
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors:
        os.wait()


def _work(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    # torch 2.13 advises to flatten dp and tp for every gather of a parameter; here they are gathered to be compared.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    while True:
        try:
            job, rank, size, store = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send_bytes(_outcome(job, rank, size, store))


def _outcome(job: bytes, rank: int, size: int, store: str) -> bytes:
    import gc

    import torch.distributed as dist

    from shardplan import _compat

    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        dist.barrier()  # a function that sends nothing would end its group while others still connect to it
        function, args = pickle.loads(job)
        return pickle.dumps((True, function(*args)))
    except Exception as error:  # noqa: BLE001 - goes back to the caller
        return pickle.dumps((False, f"raised {type(error).__name__}: {error}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _compat.forget_meshes()
        gc.collect()
