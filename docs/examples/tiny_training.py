"""A tiny Llama that learns to write Python: the training that demo.py and train.py share.

The text is the source of Python's standard library, which every machine has; a token is a byte. Every rank cuts its
rows out of the same global batch, so that a run on N processes sees what a run on one sees.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardplan import apply_plan

CORPUS_BYTES = 2_000_000


@dataclass(frozen=True)
class Setup:
    """What is trained, how long. ``batch`` counts the sequences of all ranks together; ``length`` is in bytes."""

    steps: int = 40
    batch: int = 8
    length: int = 128
    learning_rate: float = 1e-3
    max_norm: float = 1.0


@dataclass(frozen=True)
class Parallel:
    """How it is spread: the sizes of the mesh's axes, the plan, and whether the residual stream is cut."""

    dp: int
    tp: int
    plan: str = "llama"
    sequence_parallel: bool = True


def train_alone(setup: Setup) -> Iterator[float]:
    """Train in this process; yield the loss of each step."""
    yield from _train(tiny_llama(), setup, torch.device("cpu"), mesh=None)


def train_in_parallel(setup: Setup, parallel: Parallel, device: torch.device) -> Iterator[float]:
    """Train as one rank of the default process group; yield the loss of each step, the same on every rank."""
    mesh = init_device_mesh(device.type, (parallel.dp, parallel.tp), mesh_dim_names=("dp", "tp"))
    model = tiny_llama().to(device)
    model = apply_plan(model, parallel.plan, mesh, sequence_parallel=parallel.sequence_parallel)
    yield from _train(model, setup, device, mesh)


def tiny_llama() -> LlamaForCausalLM:
    """About a million parameters, in fp32, the same on every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
        )
    )


def _train(model: nn.Module, setup: Setup, device: torch.device, mesh: DeviceMesh | None) -> Iterator[float]:
    text = corpus()
    rows = rows_of(setup.batch, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)
    for step in range(setup.steps):
        tokens = global_batch(text, setup, step)[rows].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), setup.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield mean_over_dp(loss.detach(), mesh)


def corpus() -> torch.Tensor:
    """The first bytes of the standard library's top-level modules, in order of name."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:CORPUS_BYTES]


def global_batch(text: torch.Tensor, setup: Setup, step: int) -> torch.Tensor:
    """``(batch, length)`` token ids, the same on every rank: the step is the seed."""
    starts = torch.randint(len(text) - setup.length, (setup.batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + setup.length] for start in starts.tolist()]).long()


def rows_of(batch: int, mesh: DeviceMesh | None) -> slice:
    """This rank's share of a batch: ranks of one tp group take the same rows."""
    if mesh is None:
        return slice(None)
    share = batch // mesh["dp"].size()
    first = mesh["dp"].get_local_rank() * share
    return slice(first, first + share)


def mean_over_dp(loss: torch.Tensor, mesh: DeviceMesh | None) -> float:
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    if mesh is not None:
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        loss /= mesh["dp"].size()
    return loss.item()
