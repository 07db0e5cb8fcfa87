"""One Llama, sharded over two ranks in four ways, each with or without FSDP2 around it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from floor import by_hand
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from shardplan import apply_plan

LAYERS, VOCABULARY = 4, 512


def build(hidden: int) -> LlamaForCausalLM:
    """The same weights for every contestant and rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def shardplan(hidden: int, mesh: DeviceMesh, sequence_parallel: bool) -> Any:
    return apply_plan(build(hidden), "llama", mesh, sequence_parallel=sequence_parallel)


def floor(hidden: int, mesh: DeviceMesh, sequence_parallel: bool) -> Any:
    return _with_fsdp2(by_hand(build(hidden), mesh.get_group("tp"), sequence_parallel), mesh)


def per_linear(hidden: int, mesh: DeviceMesh, sequence_parallel: bool) -> Any:
    """What NeMo-RL's plan for Llama does: a style for each linear, which converts for itself."""
    model = build(hidden)
    parallelize_module(model, mesh["tp"], _styles(sequence_parallel))
    return _with_fsdp2(model, mesh)


def transformers(hidden: int, mesh: DeviceMesh, sequence_parallel: bool) -> Any:
    """transformers' own, which knows no sequence parallelism and no dp."""
    from transformers.distributed.configuration_utils import DistributedConfig

    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)  # only the first rank saves
        build(hidden).save_pretrained(Path(folders[0]))
        dist.barrier()
        config = DistributedConfig(tp_size=mesh["tp"].size())
        model = LlamaForCausalLM.from_pretrained(folders[0], dtype=torch.float32, distributed_config=config)
        dist.barrier()  # before the folder goes
    return model.train()


Contestant = Callable[[int, DeviceMesh, bool], Any]
CONTESTANTS: dict[str, Contestant] = {
    "floor": floor,
    "floor again": floor,  # A/A: what two equal contestants differ by
    "shardplan": shardplan,
    "per-linear": per_linear,
    "transformers": transformers,
}


def takes_part(name: str, mesh: DeviceMesh, sequence_parallel: bool) -> bool:
    return name != "transformers" or not (sequence_parallel or "dp" in (mesh.mesh_dim_names or ()))


def _styles(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence_parallel else Replicate()
    layer: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}": ColwiseParallel(input_layouts=stream) for name in ("q_proj", "k_proj", "v_proj")},
        **{f"mlp.{name}": ColwiseParallel(input_layouts=stream) for name in ("gate_proj", "up_proj")},
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    if sequence_parallel:
        layer |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    head = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    ends: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": head,
    }
    if sequence_parallel:
        first = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        ends |= {"model.norm": SequenceParallel(), "model.layers.0": first}
    return {**{f"model.layers.*.{name}": style for name, style in layer.items()}, **ends}


def _with_fsdp2(model: Any, mesh: DeviceMesh) -> Any:
    if "dp" in (mesh.mesh_dim_names or ()):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def step(model: Any, ids: Tensor, gradient: Tensor) -> None:
    """Forward and backward; ``gradient`` is that of all logits, of which a sharded head takes its columns."""
    logits = model(input_ids=ids, use_cache=False).logits
    own = logits.to_local() if isinstance(logits, DTensor) else logits
    part = gradient if own.shape == gradient.shape else gradient[..., : own.shape[-1]]
    own.backward(part)
    if hasattr(model, "after_backward"):
        model.after_backward()
