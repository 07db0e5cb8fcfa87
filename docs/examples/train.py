"""Train a tiny Llama under torchrun, with NCCL where CUDA is there, else with gloo.

torchrun --nproc-per-node 4 docs/examples/train.py --tp 2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from tiny_training import Parallel, Setup, train_in_parallel


def main() -> None:
    setup = Setup()
    parser = argparse.ArgumentParser(description="Train a tiny Llama on Python's standard library, under torchrun.")
    parser.add_argument("--dp", type=int, help="data-parallel ranks, over which FSDP2 shards; default: what tp leaves")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; default: %(default)s")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="keep the residual stream whole")
    parser.add_argument("--plan", default="llama", help="a shipped plan's name or a file; default: %(default)s")
    parser.add_argument("--steps", type=int, default=setup.steps, help="default: %(default)s")
    arguments = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    if not world_size:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 docs/examples/train.py --tp 2")
    dp = arguments.dp or world_size // arguments.tp
    if dp * arguments.tp != world_size:
        parser.error(f"dp * tp is {dp} * {arguments.tp}, but torchrun started {world_size} processes")
    if setup.batch % dp:
        parser.error(f"dp {dp} does not divide the batch of {setup.batch} sequences")

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel = Parallel(dp, arguments.tp, arguments.plan, not arguments.no_sequence_parallel)
    for step, loss in enumerate(train_in_parallel(Setup(steps=arguments.steps), parallel, device)):
        if dist.get_rank() == 0:
            print(f"step {step:4}  loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
