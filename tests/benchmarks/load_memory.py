"""Peak memory of each rank while weights are loaded into a sharded model, beside the size of its part of them.

    python tests/benchmarks/load_memory.py [--mesh dp=2,tp=2] [--layers 12]

A Llama in bf16, 1.3 GB with 12 layers, is written to a folder, loaded by processes of their own, and saved again. The
figure is the most private memory that a process had, above what it had before, sampled every millisecond. Pages of the
mapped files are not in it: they are the kernel's, which shares them between processes and drops them when it wants.
Exits with 1 where it is more than 1.2 times the part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory import MIB, grown
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from shardplan import apply_plan, load_weights, save_weights
from shardplan.mesh import parse_mesh
from shardplan.weights import local

ALLOWED = 1.2  # times the part
FILE_BYTES = 200 * MIB


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def write(folder: str, layers: int) -> None:
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config(layers)).save_pretrained(folder, max_shard_size=FILE_BYTES)


def measure(rank: int, mesh_text: str, layers: int, folder: str) -> None:
    torch.set_num_threads(1)
    spec = parse_mesh(mesh_text)
    store = dist.FileStore(f"{folder}/store", spec.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.size)
    mesh = init_device_mesh("cpu", [size for _, size in spec.axes], mesh_dim_names=[name for name, _ in spec.axes])
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers))
    apply_plan(model, "llama", mesh)
    loading = grown(lambda: load_weights(model, f"{folder}/in"))
    part = sum(local(parameter.detach()).nbytes for parameter in model.parameters())
    saving = grown(lambda: save_weights(model, f"{folder}/out", max_shard_bytes=FILE_BYTES))
    Path(f"{folder}/rank-{rank}").write_text(f"{part} {loading} {saving}")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure memory while loading and saving weights.")
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    ranks = parse_mesh(arguments.mesh).size
    table = Table("rank", "its part, MiB", "loading: peak, MiB", "of its part", "saving: peak beside it, MiB")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        writer = mp.get_context("spawn").Process(target=write, args=(f"{folder}/in", arguments.layers))
        writer.start()
        writer.join()
        mp.spawn(measure, (arguments.mesh, arguments.layers, folder), nprocs=ranks)
        for rank in range(ranks):
            part, loading, saving = (int(number) for number in Path(f"{folder}/rank-{rank}").read_text().split())
            worst = max(worst, loading / part)
            figures = (f"{part / MIB:.0f}", f"{loading / MIB:.0f}", f"{loading / part:.3f}", f"{saving / MIB:.0f}")
            table.add_row(str(rank), *figures)
    Console().print(table)
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
