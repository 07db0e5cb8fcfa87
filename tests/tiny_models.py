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
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import remote_code
from multimodal import GEMMA3, SEEING, SIZES

VOCABULARY = 256
BIASED = {"attention_bias": True, "mlp_bias": True}
# With weights as small as elsewhere, a branch of squared ReLUs adds next to nothing and every token goes to the same
# experts; with steps as short as in the published models, nothing depends on A_log.
NEMOTRON_H: dict[str, Any] = {
    "hidden_size": 32,
    "hybrid_override_pattern": "ME*-M",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "time_step_min": 0.01,
    "time_step_max": 1.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 16,
}
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.1,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SIZES_OF = {NemotronHConfig: NEMOTRON_H, GPT2Config: GPT2}  # in place of SIZES
PHI3 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "pad_token_id": None,
    "eos_token_id": None,
}

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
# The same, of models that the parity suite does not go through on every mesh: no plan is shipped for them, or their
# sizes divide by few degrees.
OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama-2kv": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "llama-1kv": (LlamaForCausalLM, LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "llama-odd": (LlamaForCausalLM, LlamaConfig, {"vocab_size": 251, "intermediate_size": 50, "mlp_bias": True}),
    "qwen2-1kv": (Qwen2ForCausalLM, Qwen2Config, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "phi3": (Phi3ForCausalLM, Phi3Config, PHI3),
    "phi3-mha": (Phi3ForCausalLM, Phi3Config, {**PHI3, "num_key_value_heads": 4}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "nemotron-h": (NemotronHForCausalLM, NemotronHConfig, {}),
    "nemotron-h-biased": (NemotronHForCausalLM, NemotronHConfig, {"use_bias": True, "mlp_bias": True}),
    "nemotron-h-groups-8": (NemotronHForCausalLM, NemotronHConfig, {"n_groups": 8, "mamba_num_heads": 16}),
    "nemotron-h-backbone": (remote_code.NemotronHForCausalLM, NemotronHConfig, {}),
}
PLANS = {
    "qwen2-tied": "qwen2",
    "qwen3": "qwen2",
    "mistral": "llama",
    "mixtral": "auto",  # transformers' own plan
    "gemma3-vision": "gemma3",
    "nemotron": "nemotron_h",
}


def plan_of(name: str) -> str:
    """The shipped plan for a tiny model."""
    family = name.partition("-")[0]
    return PLANS.get(name, PLANS.get(family, family))


def config(name: str, **changes: Any) -> Any:
    """The config of a tiny model with ``changes``."""
    if name in SEEING:
        return SEEING[name].config(**changes)
    _, config_class, own = _entry(name)
    return config_class(**{**SIZES_OF.get(config_class, SIZES), **own, **changes})


def build(name: str, **changes: Any) -> nn.Module:
    """The same weights in every process. ``changes`` go into the config."""
    torch.manual_seed(0)
    model: nn.Module = _class_of(name)(config(name, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():  # Gemma 3's projection of images starts at zero
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name_of_buffer, buffer in model.named_buffers():
            if name_of_buffer.endswith("e_score_correction_bias"):  # learned, though no parameter
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def build_meta(name: str, **changes: Any) -> nn.Module:
    """The same model without weights."""
    with torch.device("meta"):
        model: nn.Module = _class_of(name)(config(name, **changes))
    return model


def _class_of(name: str) -> Any:
    return SEEING[name].model_class if name in SEEING else _entry(name)[0]


def _entry(name: str) -> tuple[Any, Any, dict[str, Any]]:
    return MODELS.get(name) or OTHERS[name]
