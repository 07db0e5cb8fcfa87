"""Check the shipped plans, then train a tiny Llama on 4 processes and on one, and compare their losses.

Exits nonzero when a plan is refused, when the two losses differ by more than TOLERANCE at any step, or when the
loss does not fall.
"""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

DP, TP = 2, 2
WORLD_SIZE = DP * TP
TOLERANCE = 2e-5  # nats, at any step: fp32 sums in another order, through 40 updates; 5e-7 was measured
FALL = 0.75  # the last loss is at most this share of the first
ROWS = 12  # of the table

Losses = dict[str, list[float]]
SHARDED, ALONE = f"dp {DP}, tp {TP}, sequence parallel", "one process"


def main() -> int:
    console = Console()
    return plans_are_right(console) or losses_agree(console, train_both(console))


def plans_are_right(console: Console) -> int:
    """Run ``plan-compile --check`` on the shipped plans and their reference models; return its exit code."""
    command = [str(Path(sys.executable).with_name("plan-compile")), "--check"]
    console.print("$ plan-compile --check")
    start = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    outcome = "every shipped plan is right" if code == 0 else f"exit code {code}"
    console.print(f"{outcome} ({time.perf_counter() - start:.1f} s)\n")
    return code


def train_both(console: Console) -> Losses:
    """Train on ``WORLD_SIZE`` processes and beside them on one; return the loss of each step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_training"])
    with tempfile.TemporaryDirectory() as folder:
        return follow(context, f"{folder}/store", console)


def follow(context: ForkServerContext, store: str, console: Console) -> Losses:
    """Start the processes and show how far they are until all have ended."""
    from tiny_training import Setup

    reports: Any = context.Queue()
    targets = [(work_in_parallel, (rank, store, reports)) for rank in range(WORLD_SIZE)] + [(work_alone, (reports,))]
    processes = [context.Process(target=target, args=args, daemon=True) for target, args in targets]
    losses: Losses = {SHARDED: [], ALONE: []}
    columns = (TextColumn("{task.description:>30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        tasks = {name: progress.add_task(name, total=Setup().steps, loss=float("nan")) for name in losses}
        for process in processes:
            process.start()
        for name, loss in arriving(reports, processes):
            losses[name].append(loss)
            progress.update(tasks[name], advance=1, loss=loss)
    return losses


def arriving(reports: Any, processes: list[Any]) -> Iterator[tuple[str, float]]:
    """What the processes report, until all have ended; one that fails ends the demo."""
    while True:
        ended = all(process.exitcode == 0 for process in processes)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            sys.exit("a training process failed: see its traceback above")
        try:
            yield reports.get(timeout=0.2)
        except queue.Empty:
            if ended:
                return


def work_in_parallel(rank: int, store: str, reports: Any) -> None:
    """One of the ``WORLD_SIZE`` processes."""
    import torch
    import torch.distributed as dist

    from tiny_training import Parallel, Setup, train_in_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    for loss in train_in_parallel(Setup(), Parallel(DP, TP), torch.device("cpu")):
        if rank == 0:
            reports.put((SHARDED, loss))
    dist.destroy_process_group()


def work_alone(reports: Any) -> None:
    """The process to compare with."""
    import torch

    from tiny_training import Setup, train_alone

    torch.set_num_threads(1)
    for loss in train_alone(Setup()):
        reports.put((ALONE, loss))


def losses_agree(console: Console, losses: Losses) -> int:
    """Print both curves and their largest difference; return the exit code."""
    table = Table("step", SHARDED, ALONE, "difference", title="loss, nats per byte")
    pairs = list(zip(losses[SHARDED], losses[ALONE], strict=True))
    differences = [abs(sharded - alone) for sharded, alone in pairs]
    worst = max(range(len(differences)), key=differences.__getitem__)
    for step in sorted({*range(0, len(pairs), max(1, len(pairs) // ROWS)), worst, len(pairs) - 1}):
        table.add_row(str(step), *(f"{loss:.4f}" for loss in pairs[step]), f"{differences[step]:.1e}")
    console.print(table)

    first, last = losses[SHARDED][0], losses[SHARDED][-1]
    close, fell = differences[worst] <= TOLERANCE, last <= FALL * first
    console.print(
        f"largest difference {differences[worst]:.1e} at step {worst}, at most {TOLERANCE:.0e} allowed: "
        f"{'ok' if close else 'TOO LARGE'}"
    )
    console.print(f"loss {first:.2f} -> {last:.2f}, at most {FALL * first:.2f} allowed: {'ok' if fell else 'TOO HIGH'}")
    return 0 if close and fell else 1


if __name__ == "__main__":
    sys.exit(main())
