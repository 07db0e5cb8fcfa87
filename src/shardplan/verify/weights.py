"""Weights that hide nothing: equal on all ranks, and nowhere at a value at which a fault would not show."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NOISE = 0.1


def randomise(model: nn.Module, seed: int) -> None:
    """Move what stands at a constant away from it, in place.

    A norm at one, a bias or a router at zero hides what is wrong with it. Parameters that nobody has initialised
    (attention sinks, before a checkpoint is loaded) hold anything, also infinities.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * NOISE
            if not bool(parameter.isfinite().all()) or parameter.abs().max() > 100:
                parameter.copy_(noise)
            elif parameter.ndim <= 1 or _constant(parameter):
                parameter.add_(noise)
        for name, buffer in model.named_buffers():
            if "bias" in name and buffer.is_floating_point() and _constant(buffer):  # of a router's scores
                buffer.add_(torch.randn(buffer.shape, generator=generator) * NOISE)


def _constant(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())
