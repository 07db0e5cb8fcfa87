"""Tiny models of every family, built from configs: random weights, with norms and biases away from their defaults.

At its defaults, one and zero, a norm or a bias hides what went wrong with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 256
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
GEMMA3 = {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2, "final_logit_softcapping": 30.0}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
IMAGE_TOKEN, IMAGE_TOKENS = 255, 4
BIASED = {"attention_bias": True, "mlp_bias": True}

# name -> model class, config class, what its config says beyond SIZES
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaForCausalLM, LlamaConfig, BIASED),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3),
    "gemma3-vision": (Gemma3ForConditionalGeneration, Gemma3Config, {}),
}
PLANS = {"qwen2-tied": "qwen2", "qwen3": "qwen2", "mistral": "llama", "gemma3-vision": "gemma3"}


def plan_of(name: str) -> str:
    """The shipped plan for a tiny model."""
    return PLANS.get(name, name.partition("-")[0])


def config(name: str, **changes: Any) -> Any:
    """The config of a tiny model with ``changes``."""
    _, config_class, own = MODELS[name]
    if config_class is Gemma3Config:
        return Gemma3Config(
            text_config=config("gemma3", **changes),
            vision_config=VISION,
            mm_tokens_per_image=IMAGE_TOKENS,
            image_token_id=IMAGE_TOKEN,
        )
    return config_class(**{**SIZES, **own, **changes})


def build(name: str, **changes: Any) -> nn.Module:
    """The same weights in every process. ``changes`` go into the config."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name][0](config(name, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():  # Gemma 3's projection of images starts at zero
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def build_meta(name: str, **changes: Any) -> nn.Module:
    """The same model without weights."""
    with torch.device("meta"):
        model: nn.Module = MODELS[name][0](config(name, **changes))
    return model
