"""Private behaviour of torch that `_compat` leans on, pinned: an upgrade that changes it goes red here first."""

import compat_jobs
from pool import Pool


def test_functional_collectives(pool: Pool) -> None:
    assert pool.run(2, compat_jobs.functional_collectives) == [[True] * 5] * 2


def test_a_slice_of_a_mesh_knows_the_whole(pool: Pool) -> None:
    assert pool.run(2, compat_jobs.root_meshes) == [(2, 2)] * 2


def test_the_flat_gradient_holds_the_trained_parameters_padded_and_in_order(pool: Pool) -> None:
    for flat, parts, in_order in pool.run(2, compat_jobs.flat_gradient):
        assert flat == parts
        assert in_order
