"""`get_grad_norm` and `clip_grad_by_total_norm_`: right for every layout, in one all-reduce, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan, nan

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import gradient_jobs
import tolerances
from gradient_jobs import ORDERS, exact_norm, numbers, parameter_with, relative
from pairs import pairwise
from parity import Case
from pool import Pool
from shardplan import clip_grad_by_total_norm_, get_grad_norm, gradients, to_local_if_dtensor
from tiny_models import MODELS

MESHES = ["tp=2", "dp=1,tp=2", "dp=2,tp=2", "dp_replicate=2,dp=1,tp=2", "dp=1,tp=4", "dp=4,tp=1"]
CASES = sorted(  # those of one mesh may share a world
    (
        (Case(settings["model"], settings["mesh"], settings["sequence_parallel"]), settings["dtype"])
        for settings in pairwise(
            model=list(MODELS), mesh=MESHES, dtype=[torch.float32, torch.bfloat16], sequence_parallel=[True, False]
        )
    ),
    key=lambda pair: pair[0].mesh,
)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=lambda value: str(value))
def test_norms_of_a_model(pool: Pool, case: Case, dtype: torch.dtype) -> None:
    """Of orders 1, 2, 3 and inf, torch's of order 2 (C27); and clipping scales what the optimizer sees."""
    assert pool.run(case.world_size, gradient_jobs.norms, case, dtype, shared=True) == [[]] * case.world_size


@pytest.mark.parametrize("mesh", [*MESHES, "dp=1,cp=2,tp=2"])
def test_one_all_reduce_and_no_warning(pool: Pool, mesh: str) -> None:
    """Ours and stock clipping alike: `apply_plan` has given dp and tp one group."""
    case = Case("llama", mesh, sequence_parallel=True)
    for ours, stock, warnings in pool.run(case.world_size, gradient_jobs.collectives_of_a_norm, case):
        assert (ours, stock, warnings) == (1, 1, [])


def test_every_layout(pool: Pool) -> None:
    assert pool.run(4, gradient_jobs.by_hand) == [[]] * 4


def test_partial_gradients_travel_together(pool: Pool) -> None:
    """Without a flattened group: one all-reduce over each axis, and one of all partial gradients over tp."""
    assert pool.run(4, gradient_jobs.collectives_by_hand) == [([("dp", 1), ("tp", 2)], {})] * 4


def test_a_rank_without_gradients_joins(pool: Pool) -> None:
    assert pool.run(2, gradient_jobs.ranks_without_gradients) == [5.0, 5.0]


@pytest.mark.parametrize("order", [2, inf])
@pytest.mark.parametrize("value", [nan, inf])
def test_non_finite_on_one_rank_is_so_on_all(pool: Pool, value: float, order: float) -> None:
    assert [str(norm) for norm in pool.run(2, gradient_jobs.non_finite, value, order)] == [str(value)] * 2


@pytest.mark.parametrize(("reduce_dtype", "value"), [(torch.float32, 1.0009765625), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("mesh", ["dp=1,tp=2", "dp=2,tp=2"])
def test_a_norms_gradient_is_summed_in_the_reduce_dtype(
    pool: Pool, mesh: str, reduce_dtype: torch.dtype, value: float
) -> None:
    """C46."""
    ranks = Case("llama", mesh, sequence_parallel=True).world_size
    assert pool.run(ranks, gradient_jobs.two_parts_of_a_norm, mesh, reduce_dtype) == [{value}] * ranks


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_plain_gradients(order: float, dtype: torch.dtype) -> None:
    """3M elements, not a multiple of anything, and one of a strided layout."""
    gradients = [numbers(1733, 1741).to(dtype), numbers(300, 500, seed=1).to(dtype).T, numbers(seed=2).to(dtype)]
    norm = get_grad_norm(map(parameter_with, gradients), norm_type=order)
    assert relative(norm, exact_norm(gradients, order)) <= tolerances.OWN_NORM


def test_nothing_to_add_up() -> None:
    without = nn.Parameter(torch.ones(3))
    assert get_grad_norm([]) == get_grad_norm(without) == get_grad_norm(parameter_with(torch.zeros(0, 4))) == 0.0
    assert get_grad_norm([without, parameter_with(torch.tensor([3.0, 4.0]))], norm_type="inf") == 4.0
    clip_grad_by_total_norm_([], 1.0, 2.0)
    clip_grad_by_total_norm_(without, 1.0, 2.0)
    assert without.grad is None


@pytest.mark.parametrize("order", [0, -1, "-inf", nan])
def test_orders_that_are_no_norm(order: float | str) -> None:
    with pytest.raises(ValueError, match="norm_type must be positive"):
        get_grad_norm([], norm_type=order)


def test_called_as_nemo_rl_calls_it() -> None:
    parameter = parameter_with(torch.tensor([3.0, 4.0]))
    norm = get_grad_norm([parameter], dp_cp_group=None, tp_group=None, dtype=torch.float32)
    assert isinstance(norm, float)
    clip_grad_by_total_norm_([parameter], max_grad_norm=2.5, total_norm=norm, dtype=torch.float32)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([1.5, 2.0])
    assert to_local_if_dtensor(parameter) is parameter


@pytest.mark.parametrize("as_tensor", [False, True])
def test_clipping_scales_gradients_in_their_own_dtype(as_tensor: bool) -> None:
    parameters = [parameter_with(numbers(8, seed=n).to(t)) for n, t in enumerate((torch.bfloat16, torch.float32))]
    before = [(p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
    total = torch.tensor(8.0) if as_tensor else 8.0
    clip_grad_by_total_norm_(parameters, 2.0, total)
    for gradient, old in before:  # the same tensors
        torch.testing.assert_close(gradient, (old * (2 / (8 + 1e-6))).to(old.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("total", [0.5, 1.0, inf, nan])
def test_norms_that_do_not_scale_and_norms_that_are_not_finite(total: float, as_tensor: bool) -> None:
    parameter, stock = (parameter_with(numbers(8)) for _ in range(2))
    norm = torch.tensor(total) if as_tensor else total
    clip_grad_by_total_norm_(parameter, 1.1, norm)
    torch.nn.utils.clip_grads_with_norm_(stock, 1.1, torch.tensor(total))
    torch.testing.assert_close(parameter.grad, stock.grad, rtol=0, atol=0, equal_nan=True)
    if isnan(total) or total == inf:
        with pytest.raises(RuntimeError, match=r"total norm is (inf|nan): they cannot be clipped"):
            clip_grad_by_total_norm_(parameter, 1.1, norm, error_if_nonfinite=True)


class Waits(TorchDispatchMode):
    """Counts how often the host asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", ORDERS)
def test_the_host_waits_once(order: float) -> None:
    parameters = [parameter_with(numbers(3, 3, seed=seed)) for seed in range(20)]
    with Waits() as waits:
        get_grad_norm(parameters, norm_type=order)
    assert waits.number == 1
    with Waits() as waits:
        clip_grad_by_total_norm_(parameters, 1.0, torch.tensor(2.0))
    assert waits.number == 0


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that ``function`` has allocated at any time beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    sizes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sizes
    return max(sum(sizes[: number + 1]) for number in range(len(sizes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 8 gradients of 1M elements: one piece in fp32, and 16 bytes per row. A copy of all would be 32 MiB."""
    monkeypatch.setattr(gradients, "PIECE", 64 * gradients.ROW)
    parameters = [parameter_with(numbers(1024, 1024, seed=seed).to(dtype)) for seed in range(8)]
    rows = 8 * 1024 * 1024 // gradients.ROW
    piece = 4 * gradients.PIECE if dtype == torch.bfloat16 else 0
    assert peak_bytes(lambda: get_grad_norm(parameters)) < piece + 16 * rows + 4096
    assert peak_bytes(lambda: clip_grad_by_total_norm_(parameters, 1.0, 2.0)) < 4096
