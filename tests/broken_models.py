"""Small models by ``module:function``: one that the plan for Llama fits, and some that it does not."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(**changes: int | bool) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


def llama_49() -> nn.Module:
    return llama(intermediate_size=49)


def llama_of_5_words() -> nn.Module:
    return llama(vocab_size=5, num_key_value_heads=4)


def llama_with_dropout() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TINY, attention_dropout=0.1))


def olmo2() -> nn.Module:
    return Olmo2ForCausalLM(Olmo2Config(**TINY))


def cohere() -> nn.Module:
    return CohereForCausalLM(CohereConfig(**TINY, use_qk_norm=True, tie_word_embeddings=False))


def stablelm() -> nn.Module:
    return StableLmForCausalLM(StableLmConfig(**TINY))


class Gain(nn.Linear):
    """A linear with a parameter that no style knows."""

    def __init__(self, *args: int, **kwargs: bool) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def llama_with_gain() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = Gain(32, 48, bias=False)
    return model


def phi3() -> nn.Module:
    """Its q, k and v are one linear, and so are its gate and up."""
    return Phi3ForCausalLM(Phi3Config(**TINY))


class TwoNorms(nn.Module):
    """A final norm in two parts, both on the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def llama_with_two_norms() -> nn.Module:
    model = llama()
    model.model.norm = TwoNorms(32)
    return model


class FixedWidth(nn.Linear):
    """A projection that reshapes what it gets by its full width: no rank with a part of it can run that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(*x.shape[:2], 2, self.in_features // 2).flatten(2))


def llama_of_fixed_width() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.down_proj = FixedWidth(48, 32, bias=False)
    return model


class AcrossFeatures(nn.Module):
    """An activation that looks at all features at once, and has no weight by which one could tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x - x.mean(-1, keepdim=True))


def llama_across_features() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = AcrossFeatures()
    return model


class MlpTwice(LlamaDecoderLayer):
    """A layer that runs its MLP a second time, so that what the plan puts at the MLP's edges runs twice, too."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        x = super().forward(hidden_states, **kwargs)
        return x + self.mlp(x)


def llama_with_mlps_twice() -> nn.Module:
    model = llama()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = MlpTwice(layer.self_attn.config, index)
    return model


class Clips(LlamaMLP):
    """An MLP whose course depends on what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-10, 10) if x.abs().max() > 10 else x)


def llama_that_clips() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = Clips(model.config)
    return model


def large_llama_across_features() -> nn.Module:
    """Too large to run as it is, and not what its configuration builds."""
    model = llama(hidden_size=1024, intermediate_size=4096)
    for layer in model.model.layers:
        layer.mlp.act_fn = AcrossFeatures()
    return model


def gpt_neox() -> nn.Module:
    """Its projection lies head by head: queries, keys and values of one head side by side."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"}))


def gpt_oss() -> nn.Module:
    """transformers' plan for it names the embedding and the head alone."""
    return GptOssForCausalLM(GptOssConfig(**TINY, head_dim=8, num_local_experts=4))
