"""Models of real width for the checks and dry runs of the campaign, on the meta device: a few layers, of every kind."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from shardplan.references import load_config

LATENT = 1024  # features into which Nemotron-H may project the input of its experts


def llama() -> nn.Module:
    """Llama 3.1 8B."""
    return _built(load_config("llama-3.1-8b"), 2)


def qwen2() -> nn.Module:
    """Qwen3 8B."""
    return _built(load_config("qwen3-8b"), 2)


def gemma3() -> nn.Module:
    """Gemma 3 4B; every sixth layer attends to everything."""
    config = load_config("gemma-3-4b")
    config.vision_config.num_hidden_layers = 2
    return _built(config, 6)


def phi3() -> nn.Module:
    """Phi-4."""
    return _built(load_config("phi-4"), 2)


def gpt2() -> nn.Module:
    """GPT-2."""
    return _built(load_config("gpt2"), 2)


def nemotron_h() -> nn.Module:
    """Nemotron Nano 9B v2."""
    return _hybrid(load_config("nemotron-nano-9b-v2"), "mlp")


def nemotron_h_with_latent_experts() -> nn.Module:
    """Nemotron 3 Nano with projections around its experts."""
    config: Any = load_config("nemotron-3-nano-30b-a3b")
    config.moe_latent_size = LATENT
    return _hybrid(config, "moe")


def _hybrid(config: Any, ffn: str) -> nn.Module:
    """Each kind of block twice, but for attention."""
    config.layer_types = ["linear_attention", ffn, "linear_attention", "full_attention", ffn]
    return _built(config, 5)


def _built(config: Any, layers: int) -> nn.Module:
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    model: nn.Module = getattr(transformers, config.architectures[0])(config)
    return model
