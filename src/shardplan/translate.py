"""torch's stock parallel styles, read as layouts: what a Python plan dict says, in the words of a plan file.

Placements become layouts: ``Replicate`` is replicate, ``Shard(1)`` is the cut residual stream, any other ``Shard`` is
shard(dim), ``Partial`` is partial. Whether outputs are local tensors is not asked: modules here compute on local
tensors, and logits always leave as a DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from shardplan.plan import Rule


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
        return Reading("block", taken, handed)
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


def settle_edges(rules: Sequence[Rule]) -> list[Rule]:
    """Put conversions where a plan file has them: at a block's edges, and behind the final norm.

    torch's styles state them elsewhere: a block's output at its row-wise member, the gather before the head at the
    head. Rules that fit neither habit stay as they are, for the checks to judge.
    """
    return _gather_behind_norm(_close_blocks(list(rules)))


def _close_blocks(rules: list[Rule]) -> list[Rule]:
    """A row-wise member's output conversion, moved to the block around it."""
    settled = {rule.pattern.text: rule for rule in rules}
    for block in [rule for rule in rules if rule.style == "block"]:
        members = [r for r in rules if r.pattern.text.startswith(f"{block.pattern.text}.") and r.style == "rowwise"]
        outputs = {member.output for member in members}
        if len(outputs) == 1 and None not in outputs:
            settled[block.pattern.text] = replace(block, output=outputs.pop())
            settled |= {member.pattern.text: replace(member, output=None) for member in members}
    return list(settled.values())


def _gather_behind_norm(rules: list[Rule]) -> list[Rule]:
    """The head's gather, moved to the one sequence-parallel module that stands in no layer."""
    gather = Conversion(STREAM, REPLICATE)
    heads = [rule for rule in rules if rule.style == "colwise" and rule.input == gather and _stands_alone(rule)]
    norms = [
        rule for rule in rules if rule.style == "sequence_parallel" and rule.output is None and _stands_alone(rule)
    ]
    if len(heads) != 1 or len(norms) != 1:
        return rules
    settled = {id(heads[0]): replace(heads[0], input=None), id(norms[0]): replace(norms[0], output=gather)}
    return [settled.get(id(rule), rule) for rule in rules]


def _stands_alone(rule: Rule) -> bool:
    return not any(character in rule.pattern.text for character in "*[0123456789")
