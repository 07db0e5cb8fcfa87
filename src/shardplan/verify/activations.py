"""Where a forward first departs: the outputs of a sharded model's modules against the unsharded one's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

RELATIVE = 1e-4  # of the output's norm: more than rounding


@dataclass(frozen=True, slots=True)
class Difference:
    """The module at whose output the forward first departs, and by how much of that output's norm."""

    fqn: str
    relative: float


def first_difference(
    reference: nn.Module,
    sharded: nn.Module,
    inputs: dict[str, Tensor],
    own_inputs: dict[str, Tensor],
    own_rows: Callable[[Tensor], Tensor],
    told: Collection[str],
) -> Difference | None:
    """Run both forwards once more and compare what each module gives, in the order in which they run.

    None where all that can be told agree. Every rank must call it, and all get the same answer.

    Args:
        inputs, own_inputs: of the global batch, and this rank's rows of it.
        own_rows: cuts this rank's rows out of a tensor of the global batch.
        told: the modules whose outputs a rank has whole, or a part of the sequence of: blocks, and what is outside.
    """
    expected, actual = _outputs(reference, inputs), _outputs(sharded, own_inputs)
    rows = len(next(iter(inputs.values())))
    shared = [fqn for fqn in expected if fqn in actual and fqn in told and len(expected[fqn]) == rows]
    flags = torch.tensor([_relative(own_rows(expected[fqn]), actual[fqn]) for fqn in shared])
    if not shared:
        return None
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    wrong = [Difference(fqn, flag) for fqn, flag in zip(shared, flags.tolist(), strict=True) if flag > RELATIVE]
    return wrong[0] if wrong else None


def _outputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first output of each module, in the order in which their forwards end."""
    found: dict[str, Tensor] = {}

    def keep(fqn: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                found.setdefault(fqn, first.full_tensor() if isinstance(first, DTensor) else first)

        return hook

    handles = [module.register_forward_hook(keep(fqn)) for fqn, module in model.named_modules() if fqn]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def _relative(expected: Tensor, actual: Tensor) -> float:
    """The norm of the difference over that of the whole; 0 where the two cannot be compared."""
    if actual.shape != expected.shape:
        if actual.ndim < 2 or expected.ndim != actual.ndim:
            return 0.0
        parts = expected.shape[1] // max(1, actual.shape[1])
        if parts * actual.shape[1] != expected.shape[1] or actual.shape[2:] != expected.shape[2:]:
            return 0.0
        rank = dist.get_rank() % parts  # tp is the innermost axis
        expected = expected.chunk(parts, dim=1)[rank]
        if actual.shape != expected.shape:
            return 0.0
    return float((actual - expected).norm() / (expected.norm() + 1e-30))
