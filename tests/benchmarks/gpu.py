"""On one GPU, a world of one: host time, device time and kernel launches a layer, beside the unsharded model's.

    torchrun --nproc-per-node 1 tests/benchmarks/gpu.py [--rounds 30]

Nothing is sent in such a world: what is left is what edges, DTensor and FSDP2 cost the host, and what kernels they add.
Without a GPU it runs on the CPU, where only host time says anything. Models take turns, as in speed.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contestants import LAYERS, VOCABULARY, build, step
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[1]))

from speed import SIZES, WARM_UP

from shardplan import apply_plan

Size = tuple[int, int, int]  # hidden, sequence, batch
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


@dataclass(frozen=True)
class Spent:
    """A step: milliseconds until the host is through and until the device is, and kernels launched."""

    host: float
    device: float
    launches: int


def models(size: Size, device: torch.device, sequence_parallel: bool) -> dict[str, nn.Module]:
    meshes = {"tp=1": (("tp",), (1,)), "dp=1,tp=1": (("dp", "tp"), (1, 1))}
    found: dict[str, nn.Module] = {"unsharded": build(size[0]).to(device)}
    for mesh, (names, sizes) in meshes.items():
        over = dist.init_device_mesh(device.type, sizes, mesh_dim_names=names)
        model = build(size[0]).to(device)
        found[f"shardplan, {mesh}"] = apply_plan(model, "llama", over, sequence_parallel=sequence_parallel)
    return found


def measure(size: Size, device: torch.device, sequence_parallel: bool, rounds: int) -> dict[str, Spent]:
    _, sequence, batch = size
    ids = torch.randint(0, VOCABULARY, (batch, sequence), device=device)
    gradient = torch.randn(batch, sequence, VOCABULARY, device=device)
    contestants = models(size, device, sequence_parallel)
    steps: dict[str, Callable[[], None]] = {
        name: lambda model=model: step(model, ids, gradient)  # type: ignore[misc]
        for name, model in contestants.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        for name, run in steps.items():
            contestants[name].zero_grad()
            spent = _timed(run, device)
            if number >= WARM_UP:
                times[name].append(spent)
    return {
        name: Spent(median(h for h, _ in times[name]), median(d for _, d in times[name]), _launches(run, device))
        for name, run in steps.items()
    }


def _timed(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    _wait(device)
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    _wait(device)
    return 1000 * host, 1000 * (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _launches(run: Callable[[], None], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        _wait(device)
    return sum(event.count for event in profiler.key_averages() if event.key in LAUNCHES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    table = Table("hidden, sequence, batch", "model", "host, ms a layer", "device, ms a layer", "launches a layer")
    for size in SIZES:
        for sequence_parallel in (False, True):
            for name, spent in measure(size, device, sequence_parallel, rounds).items():
                setting = f"{', '.join(map(str, size))} {'SP' if sequence_parallel else 'TP'}"
                a_layer: list[Any] = [f"{spent.host / LAYERS:.3f}", f"{spent.device / LAYERS:.3f}"]
                table.add_row(setting, name, *a_layer, f"{spent.launches / LAYERS:.1f}")
    Console(width=140).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
