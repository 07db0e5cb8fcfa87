"""Private behaviour of torch and transformers that `_compat` leans on: what an upgrade changes goes red here first."""

from typing import Any

import torch
from torch.autograd import Function

import compat_jobs
import tiny_models
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


def test_reading_a_parameter_is_what_torch_does_but_for_its_cost(pool: Pool) -> None:
    assert pool.run(2, compat_jobs.local_gradients) == [[], []]


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


def test_transformers_computes_the_buffers_that_are_not_saved_and_nothing_else() -> None:
    model = tiny_models.build("gemma3")
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert {name.rpartition(".")[2] for name in expected} >= {"embed_scale"}
    for buffer in model.buffers():
        buffer.fill_(-1)
    _compat.compute_unsaved_buffers(model)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def test_transformers_converts_experts_both_ways_and_remembers_it() -> None:
    model, other = tiny_models.build_meta("mixtral"), tiny_models.build_meta("mixtral")
    tensors = tiny_models.build("mixtral").state_dict()
    separate = _compat.convert_for_checkpoint(model, dict(tensors))
    assert sum("experts.3.w1" in name for name in separate) == 2
    report = _compat.convert_for_model(model, {**separate, "nobody": torch.zeros(1)})
    assert report.unexpected_keys == {"nobody"}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())
    _compat.keep_conversions(model, other)
    assert _compat.convert_for_checkpoint(other, dict(tensors)).keys() == separate.keys()
