"""The same contract on CUDA and NCCL: one rank for each GPU, skipped without."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import parity
import tiny_models
from shardplan import apply_plan, cross_entropy

pytestmark = pytest.mark.gpu


def rank_main(rank: int, shape: tuple[int, int], options: dict[str, Any], folder: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    world = shape[0] * shape[1]
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
    reference = tiny_models.build("llama").cuda()
    sharded = apply_plan(tiny_models.build("llama").cuda(), "llama", mesh, **options)
    faults = []
    for model in (reference, sharded):
        ids = torch.arange(64, device="cuda").view(4, 16) * 7 % tiny_models.VOCABULARY
        rows = ids if model is reference else parity.rows_of(ids, mesh)
        cross_entropy(model(input_ids=rows, use_cache=False).logits, rows).backward()
    if options.keys() <= {"sequence_parallel"}:
        faults = list(parity.same_gradients(reference, sharded))
    Path(f"{folder}/{rank}").write_text("\n".join(faults))
    dist.destroy_process_group()


def run(shape: tuple[int, int], options: dict[str, Any]) -> list[str]:
    world = shape[0] * shape[1]
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (shape, options, folder), nprocs=world)
        return [line for rank in range(world) for line in Path(f"{folder}/{rank}").read_text().splitlines()]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients(shape: tuple[int, int], sequence_parallel: bool) -> None:
    assert run(shape, {"sequence_parallel": sequence_parallel}) == []


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)], ids=str)
def test_offload_and_mixed_precision_run(shape: tuple[int, int]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert run(shape, {"mixed_precision": policy, "sequence_parallel": True}) == []
    assert run(shape, {"cpu_offload": True, "sequence_parallel": True}) == []
