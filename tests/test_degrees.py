"""Legal tp degrees: the checks' own verdict at each, with the reason for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.degrees import Degrees, tp_degrees
from shardplan.diagnostics import errors
from shardplan.inventory import take_inventory
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.resolve import resolve
from tiny_models import build_meta

PLAN = Path(__file__).parents[1] / "plans" / "llama.yaml"
SIZES = {
    "hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 72,
}  # fmt: skip


def target(mesh: str, plan: Any = PLAN, sequence_parallel: bool = False, **sizes: Any) -> Target:
    resolved = resolve(read_plan(plan), take_inventory(build_meta("llama", **{**SIZES, **sizes})))
    return Target(resolved, parse_mesh(mesh), sequence_parallel)


def degrees(mesh: str, largest: int = 64, **options: Any) -> Degrees:
    return tp_degrees(target(mesh, **options), largest)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_divisors_of_the_world_are_tried(sequence_parallel: bool) -> None:
    found = degrees("dp=12,tp=2", sequence_parallel=sequence_parallel)
    assert (found.world, found.legal) == (24, (1, 2, 3, 6, 12))  # 12 ranks share 6 KV heads
    (refused,) = found.refused
    assert (refused.degrees, refused.code) == ((4, 8, 24), "SP201")
    assert refused.message == (
        "tp=4 does not divide the heads of model.layers.*.self_attn: 12 heads, 6 KV heads, head_dim 8"
    )


def test_a_degree_is_legal_where_the_check_passes() -> None:
    """Against `check` itself, on meshes written out by hand."""
    found = degrees("dp=12,tp=2", intermediate_size=99)
    passing = [tp for tp in (1, 2, 3, 4, 6, 8, 12, 24) if not errors(check(target(f"dp={24 // tp},tp={tp}",
               intermediate_size=99)))]  # fmt: skip
    assert list(found.legal) == passing == [1, 2, 3, 6]
    assert {(refused.degrees, refused.code) for refused in found.refused} == {
        ((12,), "SP202"),  # 9 of 99 rows on each of 11 ranks, and none on the last
        ((4, 8, 24), "SP201"),
    }


def test_other_reasons_are_said_apart() -> None:
    found = degrees("dp=4,tp=1", num_key_value_heads=12, intermediate_size=1, vocab_size=5)
    assert [(refused.degrees, refused.code) for refused in found.refused] == [((2,), "SP202"), ((4,), "SP202")]
    assert "share a dim of 1," in found.refused[0].message
    assert "share a dim of 5," in found.refused[1].message


def test_no_degree_beyond_the_largest() -> None:
    found = degrees("dp=12,tp=2", largest=3)
    assert (found.legal, found.refused) == ((1, 2, 3), ())


@pytest.mark.parametrize(
    ("mesh", "world", "legal"),
    [
        ("tp=6", 6, (1, 2, 3, 6)),
        ("dp=6", 6, (1, 2, 3, 6)),
        ("fsdp=3,tp=1", 3, (1, 3)),
        ("dp_replicate=5,dp_shard=1,tp=2", 10, (1, 2)),
        ("dp=1,cp=7,tp=2", 14, (1, 2)),
    ],
)
def test_other_axes_keep_their_sizes(mesh: str, world: int, legal: tuple[int, ...]) -> None:
    found = degrees(mesh)
    assert (found.world, found.legal, found.refused) == (world, legal, ())
