"""Private behaviour of torch that `_compat` leans on, pinned: an upgrade that changes it goes red here first."""

from typing import Any

import torch
from torch.autograd import Function

import compat_jobs
from pool import Pool
from shardplan import _compat


def test_functional_collectives(pool: Pool) -> None:
    assert pool.run(2, compat_jobs.functional_collectives) == [[True] * 5] * 2


def test_a_slice_of_a_mesh_knows_the_whole(pool: Pool) -> None:
    assert pool.run(2, compat_jobs.root_meshes) == [(2, 2)] * 2


def test_the_flat_gradient_holds_the_trained_parameters_padded_and_in_order(pool: Pool) -> None:
    for flat, parts, in_order in pool.run(2, compat_jobs.flat_gradient):
        assert flat == parts
        assert in_order


class Noting(Function):
    """Notes which node runs, at its backward."""

    seen: tuple[int, str] | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Noting.seen = _compat.running_node()
        return grad


def test_autograd_nodes_are_numbered_as_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    accumulating = []
    x.register_post_accumulate_grad_hook(lambda _: accumulating.append(_compat.running_node()))
    before = _compat.next_node()
    y = Noting.apply(x * 2)
    after = _compat.next_node()
    (y * 3).sum().backward()
    assert Noting.seen == (before + 1, "NotingBackward")
    assert after == before + 2
    assert accumulating == [None]
    assert _compat.running_node() is None
