"""What shardplan costs beside a step: seconds to import, to check and to apply, and memory, each with its budget.

    python tests/benchmarks/costs.py [--record FILE]

Every figure is from processes of its own. Seconds are CPU seconds, which a busy machine does not change much; memory is
the most private memory above what there was before, sampled every millisecond. Exits with 1 where a budget is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory import MIB, grown
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from shardplan import apply_plan
from shardplan.mesh import parse_mesh
from shardplan.weights import local


@dataclass(frozen=True)
class Cost:
    what: str
    measured: float
    unit: str
    budget: float

    @property
    def kept(self) -> bool:
        return self.measured <= self.budget


# ---------------------------------------------------------------- seconds

TIMED = """
import json, sys, time
{before}
start = time.process_time()
{what}
print(json.dumps([time.process_time() - start, "torch" in sys.modules]))
"""
IMPORTS = "import torch, transformers; from transformers import LlamaForCausalLM"
COMMAND = """
from shardplan.cli import command
try:
    command({arguments!r})
except SystemExit as left:
    assert not left.code
"""
APPLY = """
from shardplan import apply_plan
with fake_ranks(parse_mesh("dp=1024,tp=8")) as mesh:
    apply_plan(model, "llama", mesh, sequence_parallel=True)
"""
BUILD = """
from shardplan.dry_run.ranks import fake_ranks
from shardplan.mesh import parse_mesh
from shardplan.references import build_meta_model
model = build_meta_model("llama-3.1-405b")
"""


def seconds(what: str, before: str = "") -> tuple[float, bool]:
    """CPU seconds of ``what`` after ``before``, and whether torch was imported."""
    script = TIMED.format(before=before, what=what)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    spent, with_torch = json.loads(done.stdout.splitlines()[-1])
    return spent, with_torch


def seconds_spent() -> Iterator[Cost]:
    """All but the first on 405 B parameters and dp=1024,tp=8."""
    spent, with_torch = seconds("import shardplan")
    assert not with_torch, "import shardplan imports torch"
    yield Cost("`import shardplan`, without torch", spent, "s", 0.1)
    large = ["llama", "--model", "llama-3.1-405b", "--mesh", "dp=1024,tp=8"]
    check = COMMAND.format(arguments=["--check", *large])
    dry_run = COMMAND.format(arguments=["--dry-run", *large, "--sequence-parallel"])
    yield Cost("`--check` of 405B, both modes, above imports", seconds(check, IMPORTS)[0], "s", 1.5)
    yield Cost("`apply_plan` of 405B on the meta device", seconds(APPLY, IMPORTS + BUILD)[0], "s", 15.0)
    yield Cost("`--dry-run` of 405B, one mode, above imports", seconds(dry_run, IMPORTS)[0], "s", 60.0)


# ---------------------------------------------------------------- memory

MESHES = ("tp=2", "dp=2", "dp=2,tp=2")
LAYERS, LENGTH = 6, 512


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=16,
        use_cache=False,
    )


def memory(rank: int, mesh_text: str, folder: str) -> None:
    """In MiB: largest tensor, growth by `apply_plan`, this rank's part, growth by a step, what that keeps, a unit."""
    torch.set_num_threads(1)
    spec = parse_mesh(mesh_text)
    store = dist.FileStore(f"{folder}/store-{mesh_text}", spec.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.size)
    mesh = init_device_mesh("cpu", [size for _, size in spec.axes], mesh_dim_names=[name for name, _ in spec.axes])
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config())
    largest = max(parameter.nbytes for parameter in model.parameters())
    applying = grown(lambda: apply_plan(model, "llama", mesh, sequence_parallel="tp" in mesh_text))
    part = sum(local(parameter.detach()).nbytes for parameter in model.parameters())
    ids = torch.randint(0, 32000, (1, LENGTH))
    stepping = grown(lambda: model(input_ids=ids, labels=ids).loss.backward())
    saved = _saved(model, ids)
    unit = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in model.model.layers) // spec.tp
    if rank == 0:
        figures = [largest, applying, part, stepping, saved, unit if spec.size > spec.tp else 0]
        Path(f"{folder}/{mesh_text}").write_text(json.dumps([figure / MIB for figure in figures]))
    dist.barrier()
    dist.destroy_process_group()


def _saved(model: nn.Module, ids: Tensor) -> int:
    """Bytes that a forward keeps for its backward, beside parameters, each storage once."""
    own = {local(parameter.detach()).untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = local(tensor.detach()).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    total = sum(kept.values())
    loss.backward()
    return total


def memory_taken() -> Iterator[Cost]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # what is freed leaves the process
    with tempfile.TemporaryDirectory() as folder:
        for mesh in MESHES:
            mp.spawn(memory, (mesh, folder), nprocs=parse_mesh(mesh).size)
            largest, applying, part, stepping, saved, unit = json.loads(Path(f"{folder}/{mesh}").read_text())
            yield Cost(f"`apply_plan` on real weights, {mesh}: memory beside them", applying / largest,
                       "of the largest tensor", 1.25)  # fmt: skip
            yield Cost(f"a step, {mesh}: memory beside the parameters", stepping / (part + saved + unit),
                       "of gradients, activations and gathered unit", 1.15)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, help="a file for the costs, one JSON object a line")
    record = parser.parse_args().record
    costs = [*seconds_spent(), *memory_taken()]
    if record:
        record.write_text("".join(json.dumps(asdict(cost)) + "\n" for cost in costs))
    table = Table("what", "measured", "budget")
    for cost in costs:
        table.add_row(
            cost.what, f"{cost.measured:.3g} {cost.unit}", f"{cost.budget:g}", style="" if cost.kept else "red"
        )
    Console(width=140).print(table)
    return 0 if all(cost.kept for cost in costs) else 1


if __name__ == "__main__":
    sys.exit(main())
