"""Fine-tune a folder of transformers into another one, under torchrun, going on from where an earlier run stopped.

torchrun --nproc-per-node 4 docs/examples/finetune.py MODEL OUT --tp 2

OUT is written in float32, in which it trains. A run that goes on keeps the checkpoint's hyperparameters of the
optimizer.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from shardplan import apply_plan, latest_checkpoint, load_checkpoint, load_weights, save_checkpoint, save_weights
from tiny_training import Setup, corpus, global_batch, mean_over_dp, rows_of


@dataclass(frozen=True)
class Run:
    """Folders, and how long: ``checkpoints`` holds what an interrupted run goes on from."""

    source: Path
    target: Path
    checkpoints: Path
    save_every: int
    setup: Setup


def finetune(run: Run, mesh: DeviceMesh, device: torch.device) -> None:
    """Train as one rank of the default process group."""
    model = sharded_model(run.source, mesh)
    load_weights(model, run.source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.setup.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    done = 0
    if latest_checkpoint(run.checkpoints) is not None:
        done = load_checkpoint(run.checkpoints, model, optimizer, scheduler=scheduler).step
        report(f"going on after step {done}")
    text, rows, saving = corpus(), rows_of(run.setup.batch, mesh), None
    for step in range(done, run.setup.steps):
        tokens = global_batch(text, run.setup, step)[rows].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.setup.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(f"step {step:4}  loss {mean_over_dp(loss.detach(), mesh):.4f}")
        if (step + 1) % run.save_every == 0:
            if saving is not None:
                saving.wait()  # raises what went wrong with the last one
            saving = save_checkpoint(
                run.checkpoints, model, optimizer, step=step + 1, scheduler=scheduler, asynchronous=True
            )
    if saving is not None:
        saving.wait()
    save_weights(model, run.target)


def sharded_model(source: Path, mesh: DeviceMesh) -> nn.Module:
    """The model of a folder, without weights: parameters are in fp32, whatever the folder's are in."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    return apply_plan(model, "auto", mesh)


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    setup = Setup()
    parser = argparse.ArgumentParser(description="Fine-tune a model on Python's standard library, byte by byte.")
    parser.add_argument("source", type=Path, help="a folder with config.json and safetensors")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--checkpoints", type=Path, help="default: TARGET.checkpoints")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; default: %(default)s")
    parser.add_argument("--steps", type=int, default=setup.steps, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default: %(default)s")
    arguments = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    if not world_size:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 docs/examples/finetune.py MODEL OUT --tp 2")
    if world_size % arguments.tp or setup.batch % (world_size // arguments.tp):
        parser.error(
            f"{world_size} processes do not divide into tp {arguments.tp} and a batch of {setup.batch} sequences"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo beside NCCL: checkpoints in the background are agreed on between CPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (world_size // arguments.tp, arguments.tp), mesh_dim_names=("dp", "tp"))
    checkpoints = arguments.checkpoints or arguments.target.with_name(f"{arguments.target.name}.checkpoints")
    run = Run(arguments.source, arguments.target, checkpoints, arguments.save_every, Setup(steps=arguments.steps))
    finetune(run, mesh, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
