"""Recomputation of a module's forward in the backward, without a wrapper: names and hooks stay where they are."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

# Arguments by which transformers hands a layer its key-value cache, over the versions.
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class Recomputes:
    """Mixin in front of a module's class: its ``forward`` keeps its inputs only and runs again in the backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]  # a mixin: nn.Module is behind it
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **_without_cache(kwargs))


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A forward that runs twice would fill a key-value cache twice; transformers drops it for the same reason."""
    filled = {name: None for name in CACHES if kwargs.get(name) is not None}
    if filled:
        warnings.warn("recomputed layers keep no key-value cache: call the model with use_cache=False", stacklevel=2)
    return {**kwargs, **filled}


def recompute_forward(module: Any) -> None:
    """Recompute what ``module.forward`` computes; its own edges, which are hooks, run once."""
    module.__class__ = _recomputing_class(module.__class__)


@cache
def _recomputing_class(cls: type) -> type:
    return type(f"Recomputed{cls.__name__}", (Recomputes, cls), {"__module__": cls.__module__})
