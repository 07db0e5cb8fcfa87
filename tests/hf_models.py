"""Tiny models of transformers whose own plans need more than a block around some linears, each for one reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV4Config, Gemma4TextConfig, GptOssConfig, Llama4TextConfig

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 4, "index_n_heads": 2,
          "index_head_dim": 8, "index_topk": 8, "hc_mult": 2, "moe_intermediate_size": 16}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0,
             "global_head_dim": 8, "sliding_window": 8}  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    # Experts with biases, whose gate and up take turns; sinks by head.
    "gpt-oss": partial(GptOssConfig, **SIZES, **EXPERTS, sliding_window=8),
    # Experts that give all tokens in one dim.
    "llama4": partial(Llama4TextConfig, **SIZES, **EXPERTS, intermediate_size_mlp=64, attention_chunk_size=8),
    # An input of each layer for each token, and a table of words beside the embedding.
    "gemma4": partial(Gemma4TextConfig, **SIZES, **PER_LAYER),
    # Hyper-connections: several residual streams.
    "deepseek-v4": partial(DeepseekV4Config, **SIZES, **LATENT, n_routed_experts=4, num_experts_per_tok=2),
}


def build(name: str) -> nn.Module:
    """The model, with weights of its own."""
    torch.manual_seed(3)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[name]())
    return model


def build_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return build(name)
