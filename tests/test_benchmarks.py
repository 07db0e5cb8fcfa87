"""The contestants of the benchmark compute the same, and shardplan sends what hand-written collectives send."""

import pytest

import benchmark_jobs
from pool import Pool

LAYERS = 4


@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_sends_what_the_floor_sends(pool: Pool, mesh: str, sequence_parallel: bool) -> None:
    floor, own, per_linear = (
        pool.run(2, benchmark_jobs.judged, name, mesh, sequence_parallel)
        for name in ("floor", "shardplan", "per-linear")
    )
    assert [departs for departs, *_ in (*floor, *own, *per_linear)] == [[]] * 6
    # Both ends of each block, the embedding's sum and the head's; the gradients of norms in one sum, or one a unit.
    calls = 2 * (2 * LAYERS + 1) * (2 if sequence_parallel else 1)
    units = LAYERS + 1 if "dp" in mesh else 1
    assert [number for _, number, _ in floor] == [calls + sequence_parallel] * 2
    assert [number for _, number, _ in own] == [calls + sequence_parallel * units] * 2
    assert [nbytes for *_, nbytes in own] == [nbytes for *_, nbytes in floor]
    assert all(theirs > ours for (_, theirs, _), (_, ours, _) in zip(per_linear, own, strict=True))


def test_transformers_own_sends_more(pool: Pool) -> None:
    own = pool.run(2, benchmark_jobs.judged, "shardplan", "tp=2", False)
    for (departs, theirs, _), (_, ours, _) in zip(
        pool.run(2, benchmark_jobs.judged, "transformers", "tp=2", False), own, strict=True
    ):
        assert departs == []
        assert theirs > ours
