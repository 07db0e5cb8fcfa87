"""Models made small: the ratios that matter are kept, and what is built is the same architecture."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from golden import ROOT
from shardplan.diagnostics import PlanError
from shardplan.inventory import take_inventory
from shardplan.merge import read_plan
from shardplan.references import build_meta_model
from shardplan.resolve import resolve
from shardplan.verify.shrink import Shrunk, shrink
from shardplan.verify.sizes import Role, Scale, role_of
from shardplan.verify.treatments import layers_told_apart
from tiny_models import build_meta

# Classes that do not build from their own default configuration, on transformers 5.24.
NOT_BUILT = {
    "cohere_compass_text", "dbrx", "dots1", "gemma3n", "gemma4_assistant", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "lfm2_moe", "ministral", "musicgen", "musicgen_melody", "nemotron", "qwen4_exp", "qwen4_exp_text", "reformer",
}  # fmt: skip
# Those that cannot be made small yet, or do not run on a CPU with ids alone at any size, with the reason.
NOT_SHRUNK = {
    "blt": "three transformers with sizes of their own under one configuration",
    "deepseek_v2": "its default configuration chooses None experts",
    "gemma4_unified_assistant": "needs another model's states",
    "mimo_v2_flash": "flash kernels that ask for aligned strides",
    "xmod": "needs a language",
}
SWEEP = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT - set(NOT_SHRUNK))


def small(name: str, tp: int, small_tp: int = 2) -> Any:
    return shrink(build_meta_model(name), tp, small_tp).config


def test_heads_keep_their_ratio_to_tp() -> None:
    config = small("llama-3.1-70b", tp=8)
    assert (config.num_attention_heads / 2, config.num_key_value_heads / 2) == (64 / 8, 8 / 8)
    assert config.hidden_size == config.num_attention_heads * config.head_dim
    assert small("llama-3.1-70b", tp=8, small_tp=4).num_key_value_heads == 4


def test_tying_is_kept() -> None:
    assert small("llama-3.2-1b", tp=4).tie_word_embeddings
    assert not small("llama-3.1-8b", tp=4).tie_word_embeddings


def test_every_kind_of_layer_is_kept() -> None:
    kept = small("gemma-3-4b", tp=4).text_config.layer_types
    assert set(kept) == {"sliding_attention", "full_attention"}


def test_a_vocabulary_that_tp_does_not_divide_stays_one() -> None:
    scale = Scale(tp=4, small_tp=2, layers=2, width=32, head_dims=16)
    assert (scale.vocabulary(128256), scale.vocabulary(50257)) == (256, 257)
    assert (scale.features(14336) % 2, scale.features(14337) % 2) == (0, 1)


def test_names_of_fields_are_read() -> None:
    assert role_of("num_key_value_heads") is Role.HEADS
    assert role_of("n_routed_experts") is Role.EXPERTS
    assert role_of("qk_rope_head_dim") is Role.HEAD_DIM
    assert role_of("max_position_embeddings") is None


def test_what_was_made_small_is_listed() -> None:
    changes = {c.field: (c.before, c.after) for c in shrink(build_meta_model("llama-3.1-8b"), 4, 2).changes}
    assert changes["num_hidden_layers"] == (32, 2)
    assert changes["vocab_size"] == (128256, 256)


def test_a_model_without_a_configuration_is_refused() -> None:
    with pytest.raises(PlanError, match="SP903: Linear cannot be made small"):
        shrink(torch.nn.Linear(2, 2), 2, 2)


def test_a_width_that_is_a_product_stays_one() -> None:
    config = shrunk("falcon_h1").config
    assert config.mamba_d_ssm == config.mamba_n_heads * config.mamba_d_head


def test_layers_that_differ_are_made_small_each_by_itself() -> None:
    config = shrunk("dots3_note_text").config
    heads = {layer.num_attention_heads for layer in config.per_layer_config}
    assert heads == {64, 32}  # of 128 and 64, for half the ranks


@pytest.mark.parametrize(
    ("rules", "layers"),
    [
        ({}, 2),  # the stream is cut at the first
        ({"model.layers.[2-3].mlp.up_proj": "colwise"}, 3),
        ({"model.layers.3.self_attn": None}, 4),
        ({"model.layers.[1-3].mlp.up_proj": "colwise"}, 2),
    ],
)
def test_a_layer_is_kept_of_every_kind_that_the_plan_makes(rules: dict[str, str | None], layers: int) -> None:
    model = build_meta("llama", num_hidden_layers=4)
    plans: list[Any] = [ROOT / "plans" / "llama.yaml", *([rules] if rules else [])]
    resolved = resolve(read_plan(plans, ("LlamaForCausalLM",)), take_inventory(model))
    assert layers_told_apart(resolved, 4) == layers
    assert shrink(model, 4, 2, resolved).config.num_hidden_layers == layers


@pytest.mark.processes  # not quick
@pytest.mark.parametrize("model_type", SWEEP[::6])
def test_causal_language_models_of_transformers(model_type: str) -> None:
    """A sixth of them; ``python tests/test_shrink.py`` looks at all."""
    assert parameters_of_the_small(model_type) < 20_000_000


def shrunk(model_type: str) -> Shrunk:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    return shrink(model, 4, 2)


def parameters_of_the_small(model_type: str) -> int:
    return sum(parameter.numel() for parameter in shrunk(model_type)().parameters())


def main() -> None:
    for model_type in SWEEP:
        try:
            print(model_type, parameters_of_the_small(model_type))
        except PlanError as refused:
            print(model_type, str(refused).splitlines()[0])


if __name__ == "__main__":
    main()
