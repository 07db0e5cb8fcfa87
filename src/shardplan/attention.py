"""How attention modules divide their width into heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardplan.class_source import splits_by, used_by_methods
from shardplan.configuration import config_of, field_of, whole_numbers


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """How an attention module divides its width: ``heads`` query and ``kv_heads`` key-value heads of ``head_dim``.

    ``hard_coded`` names attributes that hold a number of heads, or of all their features, and that its methods use: on
    a rank with fewer heads they are wrong.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hard_coded: tuple[str, ...] = ()


def head_info(module: Any) -> HeadInfo | None:
    """transformers' attention modules carry their config and ``head_dim``; a module without either has no heads.

    So do Mamba-2 mixers, whose decay ``A_log`` tells them apart: their heads are others.
    """
    config, head_dim = config_of(module), getattr(module, "head_dim", None)
    heads = field_of(config, "num_attention_heads")
    if not isinstance(head_dim, int) or not isinstance(heads, int) or hasattr(module, "A_log"):
        return None
    kv_heads = field_of(config, "num_key_value_heads") or heads
    numbers = {f"{prefix}{n}": v for prefix, of in (("", module), ("config.", config)) for n, v in whole_numbers(of)}
    counts = {name for name, value in numbers.items() if value in {heads, kv_heads} - {1}}
    named = {name for name in counts if "head" in name and "dim" not in name and "group" not in name}
    widths = {heads * head_dim, kv_heads * head_dim}
    split = {name for name in splits_by(module.__class__) if numbers.get(name) in widths}
    hard_coded = (named & used_by_methods(module.__class__)) | split
    return HeadInfo(heads, kv_heads, head_dim, tuple(sorted(hard_coded)))
