"""Memory for a model that was sharded on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardplan import _compat
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
    _tie_again(model, [tied for tied in places.values() if len(tied) > 1])


def _devices(applied: Applied) -> tuple[torch.device, torch.device]:
    """Of parameters and of buffers."""
    cuda = applied.device_type == "cuda"
    compute = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(applied.device_type)
    return torch.device("cpu") if applied.compiled.cpu_offload else compute, compute


def _tie_again(model: nn.Module, tied: list[list[tuple[nn.Module, str]]]) -> None:
    """torch 2.13's `Module._apply` makes a parameter of its own for each place; FSDP2 holds one of them."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    held = {id(parameter.sharded_param) for unit in units for parameter in _compat.fsdp_parameters(unit)}
    for places in tied:
        candidates = [module._parameters[name] for module, name in places]
        kept = next((parameter for parameter in candidates if id(parameter) in held), candidates[0])
        for module, name in places:
            module._parameters[name] = kept
