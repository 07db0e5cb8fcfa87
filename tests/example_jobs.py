"""What tests/test_examples.py runs on the pool."""

from __future__ import annotations

import contextlib
import io
from itertools import islice
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import finetune
from tiny_training import Parallel, Setup, train_in_parallel


def trained(parallel: Parallel, steps: int) -> list[float]:
    """Losses of the first steps."""
    return list(islice(train_in_parallel(Setup(), parallel, torch.device("cpu")), steps))


def finetuned(source: Path, target: Path, checkpoints: Path) -> str:
    """What four steps print that save after every second one."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        finetune.finetune(finetune.Run(source, target, checkpoints, 2, Setup(steps=4)), mesh, torch.device("cpu"))
    return printed.getvalue()
