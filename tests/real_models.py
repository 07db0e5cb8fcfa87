"""Models of real size that no reference model has: for the checks of the campaign, on the meta device."""

from __future__ import annotations

from torch import nn
from transformers import NemotronHConfig, NemotronHForCausalLM

from shardplan.references import load_config

LATENT = 1024  # features into which Nemotron-H may project the input of its experts


def nemotron_h_with_latent_experts() -> nn.Module:
    """Nemotron 3 Nano with projections around its experts."""
    config = load_config("nemotron-3-nano-30b-a3b")
    assert isinstance(config, NemotronHConfig)
    config.moe_latent_size = LATENT
    return NemotronHForCausalLM(config)
