"""What tests/test_gradients.py runs on the pool: norms and clipping of gradients of every layout."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _redistribute as redistribute

import parity
import tiny_models
import tolerances
from counting import counted
from pool import build_mesh
from shardplan import apply_plan, clip_grad_by_total_norm_, get_grad_norm

ORDERS = (1, 2, 3, inf)


def relative(actual: float, expected: float) -> float:
    return abs(actual - expected) / expected


def exact_norm(gradients: list[Tensor], order: float) -> float:
    """Of whole gradients, in fp64."""
    return torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in gradients]), order).item()


# ---------------------------------------------------------------- models


def applied(case: parity.Case, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, DeviceMesh]:
    """A model with the gradients of one step."""
    mesh = build_mesh(case.mesh)
    model = case.apply(tiny_models.build(case.model).to(dtype), mesh)
    inputs, targets = parity.make_inputs(parity.Batch())
    parity.step(
        model, {name: parity.rows_of(value, mesh) for name, value in inputs.items()}, parity.rows_of(targets, mesh)
    )
    return model, mesh


def norms(case: parity.Case, dtype: torch.dtype) -> list[str]:
    """Norms of every order, and torch's of order 2, against fp64 on the gathered gradients; then clipped gradients."""
    model, _ = applied(case, dtype)
    parameters = [p for p in model.parameters() if p.grad is not None]
    whole = [parity.whole(p.grad).clone() for p in parameters if p.grad is not None]
    faults = []
    for order in ORDERS:
        ours, expected = get_grad_norm(model.parameters(), norm_type=order), exact_norm(whole, order)
        if not relative(ours, expected) <= tolerances.OWN_NORM:
            faults.append(f"norm of order {order} is {ours:.9g}, not {expected:.9g}")
    stock = parity.whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])).item()
    if not relative(stock, exact_norm(whole, 2)) <= (tolerances.NORM if dtype == torch.float32 else tolerances.BF16):
        faults.append(f"torch's norm is {stock:.9g}, not {exact_norm(whole, 2):.9g}")
    total = get_grad_norm(model.parameters())
    clip_grad_by_total_norm_(model.parameters(), total / 4, total)
    for parameter, before in zip(parameters, whole, strict=True):
        assert parameter.grad is not None
        if not torch.equal(parity.whole(parameter.grad), before * (total / 4 / (total + 1e-6))):
            faults.append("a clipped gradient is not the gradient times the coefficient")
    return faults


def collectives_of_a_norm(case: parity.Case) -> tuple[int, int, list[str]]:
    """All-reduces of our norm and of stock clipping, and what torch's log says of the latter."""
    said = Listener()
    redistribute._warned_flatten_issues.clear()
    redistribute.logger.addHandler(said)
    model, _ = applied(case)
    _, ours = counted(get_grad_norm, model.parameters())
    _, stock = counted(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    redistribute.logger.removeHandler(said)
    assert not ours.plain
    assert {kind for _, kind in (*ours.ours, *stock.ours)} == {"all_reduce"}
    return sum(ours.ours.values()), sum(stock.ours.values()), said.messages


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


# ---------------------------------------------------------------- gradients by hand


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter_with(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def part_of(value: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """``value`` as a gradient with these placements; a partial one is given by each rank in another share."""
    held = [Replicate() if isinstance(place, Partial) else place for place in placements]
    whole = distribute_tensor(value, mesh, held)
    local = whole.to_local()
    for dim, place in enumerate(placements):
        if place == Partial("sum"):
            local = local * (2.0 if mesh.get_local_rank(dim) else 1.0 - 2.0 * (mesh.size(dim) - 1))
        elif isinstance(place, Partial):  # of a mean
            local = local * (2.0 * mesh.get_local_rank(dim) if mesh.size(dim) == 2 else 1.0)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def by_hand() -> list[str]:
    """On dp=2,tp=2: replicated, sharded, uneven, empty, partial and plain gradients, on three meshes; one without."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = [numbers(*shape, seed=seed) for seed, shape in enumerate([(6, 5), (7, 3), (1, 4), (8, 8), (5,), (9, 2)])]
    gradients = [
        part_of(values[0], mesh, Shard(0), Replicate()),
        part_of(values[1], mesh, Shard(0), Shard(0)),  # 7 rows over 2 x 2
        part_of(values[2], mesh, Replicate(), Shard(0)),  # nothing on the second rank
        part_of(values[3], mesh, Shard(1), Partial()),
        part_of(values[4], mesh["tp"], Partial("avg")),
        part_of(values[5], mesh["dp"], Shard(0)),
        numbers(4, seed=9),
    ]
    parameters = [parameter_with(gradient) for gradient in gradients]
    parameters.append(nn.Parameter(distribute_tensor(numbers(4), mesh, [Shard(0), Replicate()])))
    faults = []
    for order in ORDERS:
        actual, expected = get_grad_norm(parameters, norm_type=order), exact_norm([*values, numbers(4, seed=9)], order)
        if not relative(actual, expected) <= tolerances.OWN_NORM:
            faults.append(f"norm of order {order} is {actual:.9g}, not {expected:.9g}")
    return faults


def collectives_by_hand() -> tuple[list[tuple[str, int]], dict[str, int]]:
    """Counts by axis for a norm without a flattened group: partial gradients of tp travel together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = {mesh.get_group(axis).group_name: axis for axis in ("dp", "tp")}
    gradients = [part_of(numbers(8, 8, seed=seed), mesh, Shard(0), Partial()) for seed in range(5)]
    gradients += [part_of(numbers(8, 8), mesh, Shard(0), Shard(1)), part_of(numbers(8, 8), mesh["tp"], Shard(0))]
    _, counting = counted(get_grad_norm, [parameter_with(gradient) for gradient in gradients])
    return sorted((names[group], number) for (group, _), number in counting.ours.items()), dict(counting.plain)


def ranks_without_gradients() -> float:
    """Rank 1 has none: it joins the collectives, and both get the same number."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(distribute_tensor(numbers(4), mesh, [Shard(0)]))
    if dist.get_rank() == 0:
        parameter.grad = part_of(torch.tensor([3.0, 4.0, 0.0, 0.0]), mesh, Shard(0))
    else:
        part_of(torch.zeros(4), mesh, Shard(0))
    return get_grad_norm(parameter)


def non_finite(value: float, order: float) -> float:
    """The norm where the second rank alone has ``value`` in its shard."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return get_grad_norm(parameter_with(part_of(torch.tensor([1.0, 1.0, value, 1.0]), mesh, Shard(0))), norm_type=order)


# ---------------------------------------------------------------- reduce dtype


def two_parts_of_a_norm(mesh_text: str, reduce_dtype: torch.dtype) -> set[float]:
    """The gradient of a norm's weight of which one tp rank holds 1 and the other 2^-10, after FSDP2's backward."""
    mesh = build_mesh(mesh_text)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = apply_plan(tiny_models.build("llama"), "llama", mesh, sequence_parallel=True, mixed_precision=policy)
    norm = model.get_submodule("model.layers.1.input_layernorm")
    # Ones are normalised to ones, so that the weight's gradient is the sum over tokens of the output's.
    norm.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),))
    own_part = 2.0**-10 if mesh.get_local_rank("tp") else 1.0

    def first_token(gradient: Tensor) -> Tensor:
        assert gradient.dtype == torch.bfloat16
        replaced = torch.zeros_like(gradient)
        replaced[0, 0] = own_part
        return replaced

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(first_token)

    norm.register_forward_hook(watch)
    parity.step(model, {"input_ids": torch.arange(32).view(2, 16)}, torch.arange(32).view(2, 16))
    gradient = norm.get_parameter("weight").grad
    assert gradient is not None
    return set(parity.whole(gradient).tolist())
