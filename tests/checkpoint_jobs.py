"""What ranks do in tests of checkpoints: folders of weights in and out, and training that stops and goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import parity
import tiny_models
from shardplan import apply_plan, load_weights, save_weights


def meta_model(name: str, mesh: Any, **changes: Any) -> nn.Module:
    return apply_plan(tiny_models.build_meta(name, **changes), tiny_models.plan_of(name), mesh)


def through(name: str, mesh_text: str, source: str, target: str, changes: dict[str, Any]) -> None:
    """From a folder into a sharded model and out into another."""
    model = meta_model(name, parity.build_mesh(mesh_text), **changes)
    load_weights(model, source)
    save_weights(model, target)
