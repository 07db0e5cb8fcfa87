"""Shards are compared where they lie: as far apart as gathered ones, and replicas to the bit."""

from __future__ import annotations

import pytest

import distance_jobs
from pool import Pool

pytestmark = pytest.mark.processes


def test_nothing_gathered_is_as_far_apart_as_all_gathered(pool: Pool) -> None:
    for ours, of_parity, gathered in pool.run(4, distance_jobs.measured, shared=True):
        assert ours == pytest.approx(gathered, rel=1e-6)
        assert of_parity == pytest.approx(gathered, rel=1e-6)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(("name", "copied"), [("whole", True), ("rows", True), ("uneven", True), ("columns", False)])
def test_replicas_that_differ_are_named(pool: Pool, rank: int, name: str, copied: bool) -> None:
    """On every rank that holds a copy; what no other rank holds has none to differ from."""
    found = pool.run(4, distance_jobs.unequal, rank, name, shared=True)
    for of_function in zip(*found, strict=True):
        assert {entry for names in of_function for entry in names} == ({name} if copied else set())
        assert of_function[rank] == ([name] if copied else [])


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("model", ["llama-tied", "phi3"])
def test_a_wrong_element_of_one_rank_is_a_wrong_gradient(pool: Pool, model: str, rank: int) -> None:
    """Of every parameter, packed and tied ones among them; every rank says the same."""
    for said in pool.run(4, distance_jobs.faults_where_a_gradient_is_altered, model, rank, shared=True):
        assert len(said) > 10
        assert [names for names in said if names != [names[0], names[0]]] == []
