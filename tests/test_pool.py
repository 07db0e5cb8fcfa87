"""The pool of processes: worlds of every size, and failures that say what happened where."""

import time
from collections.abc import Callable

import pytest
import torch

import pool_jobs
from pool import Pool, PoolError


@pytest.mark.parametrize("job", [pool_jobs.keep_a_mesh_in_a_cycle, pool_jobs.fill_the_caches_of_dtensor])
def test_groups_end_with_their_job(pool: Pool, job: Callable[[], None]) -> None:
    """A mesh holds groups, and a group holds threads: none may be left for the jobs that follow."""
    pool.run(2, job)
    before = pool.run(2, pool_jobs.os_threads)
    for _ in range(5):
        pool.run(2, job)
    after = pool.run(2, pool_jobs.os_threads)
    # Fewer, where threads of an earlier test end only now.
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def test_each_job_is_a_world_of_its_own(pool: Pool) -> None:
    for world_size in (1, 2, 3, 4, 2, 1):
        results = pool.run(world_size, pool_jobs.sum_of_ranks)
        total = world_size * (world_size - 1) / 2
        assert [result[:3] for result in results] == [(rank, world_size, total) for rank in range(world_size)]


def test_workers_are_kept(pool: Pool) -> None:
    first, second = (pool.run(2, pool_jobs.sum_of_ranks) for _ in range(2))
    assert [result[3] for result in first] == [result[3] for result in second]


def test_workers_compute_on_one_thread(pool: Pool) -> None:
    assert pool.run(4, pool_jobs.threads) == [1, 1, 1, 1]


def test_a_mesh_does_not_see_the_groups_of_an_earlier_job(pool: Pool) -> None:
    for spare_groups in (0, 3):
        for axis in ("tp", "dp"):
            for result in pool.run(4, pool_jobs.gathered_over, axis, spare_groups, timeout=20):
                assert torch.equal(result, torch.tensor([0.0, 2.0, 4.0, 6.0]))


def test_an_exception_comes_back_with_its_traceback_and_the_pool_goes_on(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(3, pool_jobs.fail_on, 1)
    assert str(caught.value).startswith("rank 1 raised:\nTraceback")
    assert "in fail_on" in str(caught.value)
    assert "KeyError: 'broken on purpose'" in str(caught.value)
    assert len(pool.run(4, pool_jobs.sum_of_ranks)) == 4


def test_a_hang_is_ended_and_shows_where_every_rank_stands(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(PoolError) as caught:
        pool.run(2, pool_jobs.wait_forever_for, 1, timeout=2)
    assert time.monotonic() - start < 10
    for rank, line in ((0, "barrier"), (1, "in wait_forever_for")):
        stack = str(caught.value).partition(f"rank {rank} still ran after 2 s:")[2].partition("rank ")[0]
        assert line in stack
    assert len(pool.run(4, pool_jobs.sum_of_ranks)) == 4


def test_a_worker_that_dies_is_named_with_its_exit_code(pool: Pool) -> None:
    with pytest.raises(PoolError, match="rank 0 died with exit code 7\n\nfinished: ranks \\[1\\]"):
        pool.run(2, pool_jobs.die_on, 0)


def test_a_result_that_cannot_travel_is_an_error(pool: Pool) -> None:
    with pytest.raises(PoolError, match="Can't pickle"):
        pool.run(1, pool_jobs.return_a_function)


def test_shared_jobs_follow_each_other_in_one_world_and_no_other_job_does(pool: Pool) -> None:
    numbers = []
    for world_size, shared in ((2, True), (2, True), (2, False), (2, True), (2, True)):
        numbers += pool.run(world_size, pool_jobs.number_of_world, shared=shared)[:1]
    first = numbers[0]
    assert numbers == [first, first, first + 1, first + 2, first + 2]
    assert {total for _, _, total, _ in pool.run(4, pool_jobs.sum_of_ranks, shared=True)} == {6.0}
    assert pool.run(2, pool_jobs.number_of_world, shared=True) == [first + 3] * 2
    with pytest.raises(PoolError):
        pool.run(2, pool_jobs.fail_on, 1, shared=True)
    assert pool.run(2, pool_jobs.number_of_world, shared=True) == [1, 1]  # of workers that are new
