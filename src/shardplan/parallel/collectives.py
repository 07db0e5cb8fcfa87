"""Edges at run time: one autograd function whose forward and backward are collectives chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardplan import _compat
from shardplan.edges import Collective


class Ranks(NamedTuple):
    """The tp group as one rank sees it. The group goes by name: picklable, and a constant for dynamo."""

    group: str
    rank: int
    size: int


def identity(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return x


def all_reduce(x: Tensor, dim: int, ranks: Ranks, *, wait: bool = True) -> Tensor:
    """Without ``wait`` the result has to be waited for."""
    return _compat.all_reduce(x, ranks.group, wait=wait)


def all_gather(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Join the ranks' chunks along ``dim``: (..., n / size, ...) -> (..., n, ...)."""
    joined = _compat.all_gather(x, ranks.group, ranks.size)
    dim %= x.ndim
    return joined if dim == 0 else joined.unflatten(0, (ranks.size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, ranks: Ranks, *, wait: bool = True) -> Tensor:
    """Sum over ranks and keep this rank's chunk along ``dim``: (..., n, ...) -> (..., n / size, ...)."""
    dim %= x.ndim
    stacked = x if dim == 0 else x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).flatten(0, 1)
    return _compat.reduce_scatter(stacked, ranks.group, ranks.size, wait=wait)


def reduce_scatter_mean(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return reduce_scatter(x, dim, ranks) / ranks.size


def chunk(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's chunk along ``dim``: (..., n, ...) -> (..., n / size, ...)."""
    chunks: Tensor = x.unflatten(dim, (ranks.size, -1))
    return chunks.select(dim % x.ndim, ranks.rank).contiguous()


def multiply(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Exact for a power of two, and undone by `reduce_scatter_mean`."""
    return x * ranks.size


Operation = Callable[[Tensor, int, Ranks], Tensor]
OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (identity, all_reduce, all_gather, reduce_scatter, reduce_scatter_mean, chunk, multiply)
}
# What a backward that has something else to do meanwhile starts, and does not wait for.
STARTED: dict[str, Operation] = {
    operation.__name__: partial(operation, wait=False) for operation in (all_reduce, reduce_scatter)
}


def require_first_backward() -> None:
    """Collectives and products with this rank's part of a weight leave nothing behind that could be differentiated.

    Raises:
        NotImplementedError: in a backward with ``create_graph=True``, whose second derivatives would be wrong.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "create_graph=True: gradients of a model that is cut over tp cannot be differentiated again, since sums "
            "over tp are in no graph; take second derivatives on a mesh without tp, or by finite differences"
        )


class _Convert(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, dim: int, ranks: Ranks, waited: bool) -> Tensor:
        ctx.mirror = (OPERATIONS if waited else STARTED)[backward], dim, ranks
        out = OPERATIONS[forward](x, dim, ranks)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        require_first_backward()
        backward, dim, ranks = ctx.mirror
        return backward(grad, dim, ranks), None, None, None, None, None


def convert(x: Tensor, collective: Collective, ranks: Ranks, *, waited: bool = True) -> Tensor:
    """Run one edge: ``collective.forward`` now, ``collective.backward`` on the gradient.

    Args:
        waited: whether the backward ends when its collective has; else who made ``x`` waits for it.
    """
    converted: Tensor = _Convert.apply(x, collective.forward, collective.backward, collective.dim, ranks, waited)
    return converted


class ScaleGradient(Function):
    """``x`` unchanged; its gradient times ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class ScaleValue(Function):
    """``x`` times ``factor``; its gradient unchanged. What one of ``1 / factor`` ranks adds to their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumGradients(Function):
    """Tensors unchanged; their gradients summed over tp in one collective.

    Part of the graph rather than a hook on the parameters: `torch.autograd.grad`, a deep copy of the model and any
    number of micro-batches need nothing special.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        require_first_backward()
        given = [grad for grad in grads if grad is not None]
        summed = iter(sum_coalesced(given, ctx.ranks))
        return (None, *(None if grad is None else next(summed) for grad in grads))


def sum_coalesced(tensors: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """Sum each tensor over tp, all of them in one collective. Dtypes are kept; the sum runs in the widest."""
    if not tensors:
        return []
    flat = _compat.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), ranks.group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
