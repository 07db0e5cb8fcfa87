"""What is read off a model, and nothing more."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig

from shardplan.attention import HeadInfo
from shardplan.inventory import ancestors, take_inventory
from shardplan.styles import Kind
from tiny_models import SIZES, build, build_meta


def test_the_facts_of_a_llama() -> None:
    inventory = take_inventory(build_meta("llama", num_key_value_heads=2))
    assert inventory.architectures[0] == "LlamaForCausalLM"
    assert (inventory.embedding, inventory.head, inventory.attention) == ("model.embed_tokens", "lm_head", "sdpa")
    assert inventory.by_fqn["model.layers.0.self_attn"].attention == HeadInfo(heads=8, kv_heads=2, head_dim=8)
    kinds = {fqn: inventory.by_fqn[fqn].kind for fqn in ("lm_head", "model.embed_tokens", "model.norm")}
    assert list(kinds.values()) == [Kind.LINEAR, Kind.EMBEDDING, Kind.OTHER]
    assert [m.fqn for m in inventory.modules if m.container] == ["model.layers"]


def test_shapes_and_bytes_of_parameters() -> None:
    inventory = take_inventory(build_meta("llama-biased"))
    fqn, inner, hidden = "model.layers.1.mlp.up_proj", SIZES["intermediate_size"], SIZES["hidden_size"]
    (weight, bias) = inventory.by_fqn[fqn].parameters
    assert (weight.fqn, weight.shape, weight.nbytes) == (f"{fqn}.weight", (inner, hidden), 4 * inner * hidden)
    assert (bias.name, bias.shape, bias.numel) == ("bias", (inner,), inner)


def test_tied_parameters_are_found_under_all_their_names() -> None:
    assert take_inventory(build_meta("llama")).ties == ()
    (group,) = take_inventory(build_meta("llama-tied")).ties
    assert [parameter.fqn for parameter in group] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert len({parameter.identity for parameter in group}) == 1


def test_a_frozen_parameter_is_known_as_such() -> None:
    model = build_meta("llama")
    model.model.norm.weight.requires_grad_(False)
    frozen = [p.fqn for p in take_inventory(model).parameters if not p.trainable]
    assert frozen == ["model.norm.weight"]


def test_nothing_is_changed() -> None:
    model = build("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    take_inventory(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_a_config_has_no_heads_and_of_ends_its_only_embedding() -> None:
    inventory = take_inventory(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2)))
    assert (inventory.embedding, inventory.head, inventory.attention) == ("1", None, None)
    assert take_inventory(nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2))).embedding is None
    assert [m.kind for m in inventory.modules] == [Kind.OTHER, Kind.LINEAR, Kind.EMBEDDING]
    assert not any(module.attention for module in inventory.modules)


def test_ancestors_go_up_to_the_model() -> None:
    assert list(ancestors("a.b.c")) == ["a.b", "a", ""]
    assert list(ancestors("")) == []


class Attention(nn.Module):
    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, 8


def test_layers_that_differ_have_heads_of_their_own() -> None:
    different = {1: {"num_attention_heads": 16, "num_key_value_heads": 4, "sliding_window": 32}}
    config = PreTrainedConfig(**SIZES, sliding_window=None, per_layer_config=different)
    model = nn.ModuleList(Attention(config, index) for index in range(2))
    model.config = config
    inventory = take_inventory(model)
    assert [module.attention for module in inventory.modules[1:]] == [HeadInfo(8, 4, 8), HeadInfo(16, 4, 8)]
    assert "num_attention_heads" not in dict(inventory.sizes)
    assert inventory.sliding_window
