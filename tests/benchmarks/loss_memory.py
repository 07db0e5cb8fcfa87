"""Peak memory of the loss on two ranks: sharded logits against gathered ones.

    python tests/benchmarks/loss_memory.py [--vocabulary 128256] [--sequence 4096]

Each way runs in processes of its own, forward and backward on bf16 logits; the figure is what the resident set of rank
0 grew above the logits themselves.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardplan import cross_entropy

RANKS = 2
MIB = 2**20


def sharded(logits: DTensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


def gathered(logits: DTensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.full_tensor().float().flatten(0, -2), labels.flatten())


WAYS: dict[str, Callable[[DTensor, Tensor], Tensor]] = {"shardplan.cross_entropy": sharded, "gathered, fp32": gathered}


def measure(rank: int, way: str, vocabulary: int, sequence: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    local = torch.randn(1, sequence, vocabulary // RANKS, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, sequence), generator=torch.Generator().manual_seed(0))
    logits = DTensor.from_local(local, mesh, [Shard(2)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = WAYS[way](logits, labels)
    loss.backward()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if rank == 0:
        Path(results).write_text(f"{grown / 1024} {loss.item()}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--sequence", type=int, default=4096)
    arguments = parser.parse_args()
    size = arguments.vocabulary // RANKS * arguments.sequence * 2 / MIB
    shape = f"vocabulary {arguments.vocabulary}, sequence {arguments.sequence}, tp {RANKS}"
    table = Table(title=f"{shape}\nbf16 logits of {size:.0f} MiB per rank")
    for heading in ("loss", "peak above the logits, MiB", "value"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            files = f"{folder}/store", f"{folder}/results"
            mp.spawn(measure, (way, arguments.vocabulary, arguments.sequence, *files), nprocs=RANKS)  # type: ignore[no-untyped-call]
            grown, value = Path(files[1]).read_text().split()
        table.add_row(way, f"{float(grown):.0f}", f"{float(value):.5f}")
    Console().print(table)


if __name__ == "__main__":
    main()
