"""Gradients of replicated parameters that each tp rank sees only a part of: summed over tp, coalesced.

Under FSDP2 the sum runs on a unit's reduced flat gradient: in the reduce dtype and before it is added to ``.grad``,
so micro-batches, `set_requires_gradient_sync` and recomputation need nothing special. Without FSDP2 it is part of the
graph: the decoder's forward starts with one node through which all such parameters are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardplan import _compat
from shardplan.parallel.collectives import Ranks, SumGradients, sum_coalesced

Owner = tuple[Any, str]  # a module that reads its parameters locally, and the name of one


def sum_in_graph(start: nn.Module, owners: Sequence[Owner], ranks: Ranks) -> None:
    """Read ``owners`` through one summing node, made anew whenever ``start`` begins a forward."""
    if owners:
        start.register_forward_pre_hook(partial(_read_through_sum, tuple(owners), ranks))


def _read_through_sum(owners: tuple[Owner, ...], ranks: Ranks, start: nn.Module, args: tuple[Any, ...]) -> None:
    """A frozen parameter has no gradient to sum and is read as it is."""
    trained = [owner for owner in owners if _parameter(owner).requires_grad]
    local = [_parameter(owner).to_local() for owner in trained]
    summed = dict(zip(trained, SumGradients.apply(ranks, *local), strict=True)) if trained else {}
    for owner in owners:
        module, name = owner
        module.tp_summed[name] = summed.get(owner)


def sum_in_units(units: Sequence[FSDPModule], owners: Sequence[Owner], ranks: Ranks) -> None:
    """Sum ``owners``' gradients at the end of each unit's reduction."""
    partial_parameters = {id(_parameter(owner)) for owner in owners}
    for unit in units:
        parameters = _compat.fsdp_parameters(unit)
        summed = tuple(id(parameter.sharded_param) in partial_parameters for parameter in parameters)
        if any(summed):
            # A fixed layout of the flat gradient: without it, parameters that got no gradient are left out.
            unit.set_reduce_scatter_unused_params(True)
            unit.set_all_reduce_hook(partial(_sum_parts, parameters, summed, ranks))


def _sum_parts(parameters: list[Any], summed: tuple[bool, ...], ranks: Ranks, flat: Tensor) -> None:
    trained = [(p, s) for p, s in zip(parameters, summed, strict=True) if p.sharded_param.requires_grad]
    parts = flat.split([p.padded_sharded_param_size.numel() for p, _ in trained])
    partial_parts = [part for part, (_, s) in zip(parts, trained, strict=True) if s]
    for part, total in zip(partial_parts, sum_coalesced(partial_parts, ranks), strict=True):
        part.copy_(total)


def _parameter(owner: Owner) -> DTensor:
    module, name = owner
    parameter = module._parameters[name]
    return cast(DTensor, parameter)
