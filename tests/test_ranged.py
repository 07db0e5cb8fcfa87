"""Names with ranges: exact, and few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardplan.patterns import parse_pattern
from shardplan.ranged import ranged, spelled_out


def test_layers_become_ranges() -> None:
    assert ranged(["norm", *(f"layers.{i}.mlp" for i in (0, 1, 2, 3, 7))]) == {"norm": 1, "layers.[0-3,7].mlp": 5}
    assert ranged(["layers.5.mlp"]) == {"layers.5.mlp": 1}
    assert ranged([""]) == {"": 1}
    assert ranged(["a.01", "a.1", "a.2"]) == {"a.01": 1, "a.[1-2]": 2}


def test_two_numbers_are_grouped_where_all_pairs_are_there() -> None:
    names = [f"l.{i}.experts.{j}" for i in range(4) for j in range(8) if (i, j) != (2, 7)]
    assert ranged(names) == {"l.[0-1,3].experts.[0-7]": 24, "l.2.experts.[0-6]": 7}


@given(st.sets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 12), st.integers(0, 3)), max_size=40))
def test_nothing_is_lost(parts: set[tuple[str, int, int]]) -> None:
    names = {f"{word}.{i}.x.{j}" for word, i, j in parts}
    written = ranged(names)
    back = [name for short in written for name in spelled_out(short)]
    assert sorted(back) == sorted(names)
    assert sum(written.values()) == len(names)
    for short in written:  # as a pattern it means the same
        (alternative,) = parse_pattern(short).alternatives
        assert {name for name in names if alternative.matches(name)} == set(spelled_out(short))
