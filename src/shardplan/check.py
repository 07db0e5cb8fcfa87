"""The checks: an ordered tuple of pure functions from a resolved plan to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardplan.checks.architectures import check_architectures
from shardplan.checks.claims import check_claims, check_rule_ties
from shardplan.checks.dead import check_dead_rules, check_styles
from shardplan.checks.filled import check_filled
from shardplan.checks.gradients import check_gradients, check_ties
from shardplan.checks.idle import check_idle_rules, check_ignored_edges, check_towers, check_whole
from shardplan.checks.kinds import check_kinds, check_parameters, check_token_mixers, check_unknown_parameters
from shardplan.checks.layouts import check_conversions, check_groups, check_places, check_repeats
from shardplan.checks.members import check_members
from shardplan.checks.options import check_dropout, check_options, check_reduce_dtype
from shardplan.checks.packed import check_dim, check_local_sizes, check_packed, check_packing, check_sections
from shardplan.checks.parts import check_orphaned_parts, check_parts
from shardplan.checks.side import (
    check_added_once,
    check_counted_once,
    check_expert_biases,
    check_norms_of_parts,
    check_shards,
    check_side_parameters,
    check_whole_experts,
)
from shardplan.checks.sizes import check_dims, check_expert_rows, check_head_counts, check_heads, check_shared_heads
from shardplan.checks.stream import check_layers, check_stream
from shardplan.checks.target import Target
from shardplan.checks.transformers import check_known_wrong, check_left_by_transformers, check_unmatched
from shardplan.checks.units import check_units
from shardplan.diagnostics import Diagnostic

Check = Callable[[Target], Iterator[Diagnostic]]

CHECKS: tuple[Check, ...] = (
    check_known_wrong,
    check_styles,
    check_dead_rules,
    check_left_by_transformers,
    check_unmatched,
    check_filled,
    check_rule_ties,
    check_claims,
    check_kinds,
    check_parameters,
    check_unknown_parameters,
    check_token_mixers,
    check_units,
    check_members,
    check_packed,
    check_parts,
    check_orphaned_parts,
    check_sections,
    check_packing,
    check_dim,
    check_conversions,
    check_groups,
    check_places,
    check_repeats,
    check_stream,
    check_layers,
    check_gradients,
    check_ties,
    check_heads,
    check_local_sizes,
    check_shared_heads,
    check_head_counts,
    check_dims,
    check_expert_rows,
    check_side_parameters,
    check_whole_experts,
    check_norms_of_parts,
    check_counted_once,
    check_added_once,
    check_expert_biases,
    check_shards,
    check_options,
    check_reduce_dtype,
    check_dropout,
    check_idle_rules,
    check_ignored_edges,
    check_whole,
    check_towers,
)


def check(target: Target) -> tuple[Diagnostic, ...]:
    """Every finding of every check, in the order of ``CHECKS``, each once.

    A plan for another model is refused with that alone: all else would follow from it.
    """
    wrong_model = tuple(check_architectures(target))
    if wrong_model:
        return wrong_model
    return tuple(dict.fromkeys(finding for run in CHECKS for finding in run(target)))
