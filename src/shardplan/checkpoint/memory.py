"""Memory for a model that was sharded on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardplan.apply import Applied


def materialise(model: nn.Module, applied: Applied) -> None:
    """Give what is on the meta device memory without values; the rest stays as it is, and tied parameters stay tied."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old ones, whose ids would go to others
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    device, compute = _devices(applied)

    def with_memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            where = device if isinstance(tensor, nn.Parameter) else compute
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=where)
        return made[id(tensor)][1]

    model._apply(with_memory)
    _tie_again([tied for tied in places.values() if len(tied) > 1])


def _devices(applied: Applied) -> tuple[torch.device, torch.device]:
    """Of parameters and of buffers."""
    cuda = applied.device_type == "cuda"
    compute = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(applied.device_type)
    return torch.device("cpu") if applied.compiled.cpu_offload else compute, compute


def _tie_again(tied: list[list[tuple[nn.Module, str]]]) -> None:
    """torch 2.13's `Module._apply` keeps a DTensor the same parameter, and makes a plain one anew for each place."""
    for (first, own), *others in tied:
        for module, name in others:
            module._parameters[name] = first._parameters[own]
