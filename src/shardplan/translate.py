"""torch's stock parallel styles, read as layouts: what a Python plan dict says, in the words of a plan file.

Placements become layouts: ``Replicate`` is replicate, ``Shard(1)`` is the cut residual stream, any other ``Shard`` is
shard(dim), ``Partial`` is partial. Whether outputs are local tensors is not asked: modules here compute on local
tensors, and logits always leave as a DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from shardplan.layouts import PARTIAL, REPLICATE, SEQUENCE_DIM, STREAM, Conversion, Layout, shard


@dataclass(frozen=True, slots=True)
class Reading:
    """What a stock style says: a style of ours, None for edges alone, and the edges that it states."""

    style: str | None
    input: Conversion | None = None
    output: Conversion | None = None


def read_parallel_style(style: ParallelStyle) -> Reading | None:
    """Read a stock torch style; None for any other class, whose meaning only its code knows."""
    if type(style) is ColwiseParallel:
        return Reading(
            "colwise",
            input=_changed(_layout(style.input_layouts[0]), REPLICATE),
            output=_changed(shard(-1), _layout(style.output_layouts[0])),
        )
    if type(style) is RowwiseParallel:
        # What stands before a row-wise linear is its own part of the features; before an embedding it is the ids.
        given = _layout(style.input_layouts[0])
        return Reading(
            "rowwise",
            input=_changed(given, shard(-1)),
            output=Conversion(PARTIAL, _layout(style.output_layouts[0])),
        )
    if type(style) is SequenceParallel and style.sequence_sharding == (Shard(SEQUENCE_DIM),):
        return Reading("sequence_parallel")
    return _read_preparation(style)


def _read_preparation(style: ParallelStyle) -> Reading | None:
    """Conversions at a module's edges. One that replicates the input opens a block: members share the conversion."""
    given = style
    taken, handed = None, None
    if type(style) is PrepareModuleInputOutput:
        taken, handed = _prepared_input(style.prepare_module_input), _prepared_output(style.prepare_module_output)
    elif type(style) is PrepareModuleInput:
        taken = _prepared_input(style)
    elif type(given) is PrepareModuleOutput:
        handed = _prepared_output(given)
    else:
        return None
    if taken is not None and taken.target == REPLICATE:
        # The members state how their outputs leave the block, so the block itself changes nothing there.
        return Reading("block", taken, handed or Conversion(STREAM, STREAM))
    return Reading(None, taken, handed)


def _prepared_input(style: PrepareModuleInput) -> Conversion | None:
    by_position = zip(style.input_layouts or (), style.desired_input_layouts or (), strict=False)
    by_name = (
        (style.input_kwarg_layouts[k], style.desired_input_kwarg_layouts.get(k)) for k in style.input_kwarg_layouts
    )
    return _first_conversion([*by_position, *by_name])


def _prepared_output(style: PrepareModuleOutput) -> Conversion | None:
    return _first_conversion(list(zip(style.output_layouts, style.desired_output_layouts, strict=True)))


def _first_conversion(pairs: Sequence[tuple[Any, Any]]) -> Conversion | None:
    pair = next(((given, wanted) for given, wanted in pairs if given is not None and wanted is not None), None)
    return Conversion(_layout(pair[0]), _layout(pair[1])) if pair else None


def _changed(source: Layout, target: Layout) -> Conversion | None:
    return None if source == target else Conversion(source, target)


def _layout(placement: Placement) -> Layout:
    if placement == Replicate():
        return REPLICATE
    if isinstance(placement, Shard):
        return STREAM if placement.dim == SEQUENCE_DIM else shard(-1 if placement.dim == 2 else placement.dim)
    return PARTIAL
