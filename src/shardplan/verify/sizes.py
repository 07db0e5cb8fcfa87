"""Which field of a transformers configuration is which size, by name, and how each kind of size is made small.

transformers has no common vocabulary for sizes: hidden_size, d_model, n_embd and emb_dim are one thing. Names decide,
and `shrink` compares what is built, so that a field that is read wrongly costs an attempt and never a wrong proof.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Role(Enum):
    """What a field counts."""

    LAYERS = "layers"
    HEADS = "heads"
    HEAD_DIM = "head dims"
    WIDTH = "widths"
    INNER = "widths inside MLPs and experts"
    VOCABULARY = "vocabulary"
    TOKEN = "token ids"
    EXPERTS = "experts"
    EXPERT_GROUPS = "groups of experts"
    CHOSEN = "experts chosen"
    CHOSEN_GROUPS = "groups of experts chosen"
    WINDOW = "windows"
    STATE = "state sizes"
    DROPOUT = "dropout"
    INITIAL = "initial weights"


# The first that fits counts.
_NAMES: tuple[tuple[str, Role], ...] = (
    (r"(vocab_size|vocab_size_per_layer_input|unpadded_vocab_size|codebook_size)", Role.VOCABULARY),
    (r".*(_token_id|_token_index|_index)|.*_token_ids", Role.TOKEN),
    (r"(initializer_range|init_std)", Role.INITIAL),
    (r".*(drop|dropout)(_rate|_prob|p)?|.*_?pdrop", Role.DROPOUT),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num", Role.EXPERTS),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k", Role.CHOSEN),
    (r"n_group|num_expert_group", Role.EXPERT_GROUPS),
    (r"topk_group", Role.CHOSEN_GROUPS),
    (
        r"num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|encoder_layers|num_encoder_layers"
        r"|num_blocks|depth|max_window_layers|num_kv_shared_layers|num_nextn_predict_layers",
        Role.LAYERS,
    ),
    (r".*(head_dim|head_size|headdim)|d_head|d_kv|dim_head|kv_channels|rotary_dim|mamba_d_head|d_rel", Role.HEAD_DIM),
    (
        r".*(num|n)_(\w+_)?heads|n_head|n_head_kv|attention_heads|\w+_attention_heads|linear_num_\w+_heads"
        r"|n_groups|mamba_n_?groups|num_query_groups|o_groups|(num|n)_attention_heads_per_layer",
        Role.HEADS,
    ),
    (r".*(window|window_size|window_len|chunk_size|attention_chunk_size|index_topk|block_size)", Role.WINDOW),
    (r"ssm_state_size|mamba_d_state|state_size", Role.STATE),
    (
        r".*(intermediate_size\w*|ffn_dim|ffn_hidden_size|n_inner|dff|d_ff|dim_ff|feed_forward_size|mlp_dim)",
        Role.INNER,
    ),
    (
        r"(hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|input_embedding_size"
        r"|output_embedding_size|lru_width|attention_hidden_size|mamba_d_ssm|hidden_size_\w+|dim)"
        r"|.*(d_inner|multiple_of|_rank|_lora_rank|lowrank|router_hidden_size)",
        Role.WIDTH,
    ),
)
_COMPILED = tuple((re.compile(pattern), role) for pattern, role in _NAMES)


def role_of(name: str) -> Role | None:
    """What a field's name says that it counts; None for all that stays as it is."""
    return next((role for pattern, role in _COMPILED if pattern.fullmatch(name)), None)


@dataclass(frozen=True, slots=True)
class Scale:
    """How far sizes are brought down.

    Attributes:
        tp: the degree that the plan is for; ``small_tp``: the one that it is proven on. Heads keep their ratio to it.
        head_dim: what the head dim becomes.
        layers: how many layers are kept, the first ones.
        width: what hidden and inner widths are divided by; so are ranks of low-rank projections.
        head_dims: what head dims are divided by.
    """

    tp: int
    small_tp: int
    layers: int
    width: float
    head_dims: float

    def heads(self, number: int) -> int:
        return max(1, number * self.small_tp // self.tp) if number > 1 else number

    def dim(self, number: int) -> int:
        """Even: rotary embeddings halve it."""
        small = int(number / self.head_dims)
        return max(4, small + small % 2) if number > 4 else number

    def features(self, number: int) -> int:
        """Divisible by the tp degree where it was before, and not where it was not."""
        if number <= 16:
            return number
        small = max(8, round(number / self.width))
        if number % self.tp == 0:
            return -(-small // self.small_tp) * self.small_tp
        return small + (small % self.small_tp == 0)

    def inner_features(self, number: int) -> int:
        """As `features`; a rank's part stays one that grouped matrix products take, of whole lines of 16 bytes."""
        small = self.features(number)
        return -(-small // (LINE * self.small_tp)) * LINE * self.small_tp if number % (LINE * self.tp) == 0 else small

    def vocabulary(self, number: int) -> int:
        small = min(number, 256)
        return small if number % self.tp == 0 else small + (small % self.small_tp == 0)


EXPERTS, GROUPS = 8, 2
LINE = 8  # elements of bf16 in 16 bytes


def small(role: Role, value: Any, scale: Scale, vocabulary: int) -> Any:
    """The value that a field of that role gets; lists are brought down entry by entry."""
    if isinstance(value, list | tuple):
        return [small(role, entry, scale, vocabulary) for entry in value]
    if role is Role.DROPOUT:
        return 0.0 if isinstance(value, float) else value
    if role is Role.INITIAL:
        return 0.1 if isinstance(value, float) else value  # at these widths 0.02 leaves attention uniform
    if type(value) is not int or value <= 0:
        return value
    by_role: Mapping[Role, int] = {
        Role.VOCABULARY: scale.vocabulary(value),
        Role.TOKEN: value if value < vocabulary else value % vocabulary,
        Role.EXPERTS: min(value, EXPERTS),
        Role.CHOSEN: min(value, 2),
        Role.EXPERT_GROUPS: min(value, GROUPS),
        Role.CHOSEN_GROUPS: 1,
        Role.LAYERS: min(value, scale.layers),
        Role.HEADS: scale.heads(value),
        Role.HEAD_DIM: scale.dim(value),
        Role.WIDTH: scale.features(value),
        Role.INNER: scale.inner_features(value),
        Role.WINDOW: min(value, 8),
        Role.STATE: min(value, 16),
    }
    return by_role[role]
