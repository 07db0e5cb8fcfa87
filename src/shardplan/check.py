"""The checks: an ordered tuple of pure functions from a resolved plan to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardplan.checks.layouts import check_block_members, check_edges, check_gradients, check_ties
from shardplan.checks.matching import (
    check_architectures,
    check_claims,
    check_dead_rules,
    check_kinds,
    check_rule_ties,
    check_styles,
    check_units,
)
from shardplan.checks.sizes import check_dims, check_heads
from shardplan.checks.target import Target
from shardplan.diagnostics import Diagnostic

Check = Callable[[Target], Iterator[Diagnostic]]

CHECKS: tuple[Check, ...] = (
    check_architectures,
    check_styles,
    check_dead_rules,
    check_rule_ties,
    check_claims,
    check_kinds,
    check_units,
    check_block_members,
    check_edges,
    check_gradients,
    check_ties,
    check_heads,
    check_dims,
)


def check(target: Target) -> tuple[Diagnostic, ...]:
    """Every finding of every check, in the order of ``CHECKS``, each once."""
    return tuple(dict.fromkeys(finding for run in CHECKS for finding in run(target)))
