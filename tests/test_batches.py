"""Ranks of a tp group train on the same batch, data-parallel ranks on different rows."""

import pytest

import batch_jobs
from pool import Pool


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("dp=2,tp=2", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("tp=4", [(0, 1)] * 4),
        ("dp=4,tp=1", [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("dp_replicate=2,dp=1,tp=2", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("dp_replicate=2,dp_shard=2", [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("fsdp=2,cp=2", [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_rank_and_size(pool: Pool, mesh: str, expected: list[tuple[int, int]]) -> None:
    assert pool.run(4, batch_jobs.rank_and_size, mesh) == expected


def test_a_sampler_deals_out_every_row_once(pool: Pool) -> None:
    rows = pool.run(4, batch_jobs.rows_by_sampler, "dp=2,tp=2")
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    assert sorted(rows[0] + rows[2]) == list(range(8))


@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2", "dp=2,tp=2", "dp=2"])
def test_the_same_over_tp_is_accepted(pool: Pool, mesh: str) -> None:
    ranks = 4 if mesh == "dp=2,tp=2" else 2
    assert pool.run(ranks, batch_jobs.accepted, mesh) == [None] * ranks


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("one id", "different batches: input_ids;"),
        ("one bit", "different batches: masks[0];"),
        ("a shape", "different batches: input_ids;"),
        ("a dtype", "different batches: input_ids;"),
        ("a number", "different batches: weight;"),
        ("another name", "batches of different structure"),
        ("one tensor more", "batches of different structure"),
        ("None", "batches of different structure"),
    ],
)
def test_what_differs_is_named(pool: Pool, other: str, named: str) -> None:
    for message in pool.run(2, batch_jobs.complaint, "tp=2", 1, other):
        assert named in message
        assert "data_parallel_rank_and_size(mesh)" in message


@pytest.mark.parametrize("other", ["one id", "another name"])
def test_every_rank_of_the_mesh_raises(pool: Pool, other: str) -> None:
    """The other tp group would wait for the first one in FSDP2."""
    *concerned, third, fourth = pool.run(4, batch_jobs.complaint, "dp=2,tp=2", 0, other)
    assert all("ranks of one tp group received" in message for message in concerned)
    assert all("another tp group received different batches" in message for message in (third, fourth))


def test_what_cannot_be_compared_is_said(pool: Pool) -> None:
    for message in pool.run(2, batch_jobs.unknown_leaf):
        assert "the batch holds object under 'cache.keys', which cannot be compared" in message
