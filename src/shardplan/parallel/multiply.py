"""Products with cut weights; and the gradients of weights while that of a block's input is summed over tp.

The backward of a column-wise linear is two products: the gradient of its input, which the block's edge sums over tp,
and that of its weight, for which nobody waits. So the edge starts its collective first and waits behind the second
products (as Korthikanti et al. 2022 do in a linear of their own)::

    forward     x  ->  _Read, of x and the weights  ->  _Convert  ->  _Multiply, once for each linear
    backward           3. gradients of the weights,     2. starts     1. gradient of its input;
                          then waits for the sum           the sum       its factors are left to _Read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardplan import _compat
from shardplan.parallel.collectives import require_first_backward


class Left:
    """What the linears of one forward of a block leave to be multiplied: output gradient and input, by their number."""

    def __init__(self) -> None:
        self.backward = -1
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, number: int, grad: Tensor, x: Tensor) -> None:
        self._forget_others()
        self.factors[number] = grad, x

    def take(self, number: int) -> Tensor | None:
        self._forget_others()
        return _weight_gradient(*self.factors.pop(number)) if number in self.factors else None

    def _forget_others(self) -> None:
        """A backward that asks for some gradients only, as `torch.autograd.grad` does, may never come to take them."""
        if self.backward != _compat.running_backward():
            self.backward = _compat.running_backward()
            self.factors.clear()


class Ahead(NamedTuple):
    """The weight of a linear, read before the block around it converts its input."""

    weight: Tensor
    left: Left
    number: int


def read_ahead(x: Tensor, linears: Sequence[Any]) -> Tensor:
    """Read the weights of ``linears`` for the products that they are about to make.

    Returns:
        ``x``, whose gradient is to be the result of a collective that was started: it is waited for here.
    """
    left = Left()
    x, *weights = _Read.apply(left, x, *[linear._parameters["weight"] for linear in linears])
    for number, (linear, weight) in enumerate(zip(linears, weights, strict=True)):
        object.__setattr__(linear, "tp_ahead", Ahead(weight, left, number))
    return x


def can_be_read_ahead(linear: Any) -> bool:
    """An FSDP2 unit of its own gathers its weight when it begins; until then that lies on a mesh of two axes."""
    weight = linear._parameters["weight"]
    return isinstance(weight, DTensor) and weight.device_mesh.ndim == 1 and weight.requires_grad


def builds_own_graph(x: Tensor) -> bool:
    """Whether autograd's graph may be of functions of our own: dynamo and autocast look into torch's alone."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch.is_autocast_enabled(x.device.type)


def local_product(x: Tensor, weight: Any, bias: Tensor | None, ahead: Ahead | None) -> Tensor:
    """``x`` (..., in) times this rank's part of ``weight`` (out, in), transposed, plus ``bias`` (out) -> (..., out)."""
    if not isinstance(weight, DTensor):  # FSDP2 has put a plain tensor in its place
        return functional.linear(x, weight, bias)
    if not builds_own_graph(x):
        return functional.linear(x, _compat.local(weight), bias)
    left, number = (ahead.left, ahead.number) if ahead else (None, 0)
    product: Tensor = _Multiply.apply(x, ahead.weight if ahead else weight, bias, left, number)
    return product


class _Read(Function):
    """The block's input as it is, and parameters -> their local parts."""

    @staticmethod
    def forward(ctx: Any, left: Left, x: Tensor, *weights: DTensor) -> tuple[Tensor, ...]:
        ctx.left, ctx.specs = left, [weight._spec for weight in weights]
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(weight._local_tensor.view_as(weight._local_tensor) for weight in weights)

    @staticmethod
    def backward(ctx: Any, started: Tensor | None, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = (ctx.left.take(number) if grad is None else grad for number, grad in enumerate(given))
        of_weights = [_compat.laid_out(grad, spec) for grad, spec in zip(grads, ctx.specs, strict=True)]
        return None, None if started is None else _compat.wait(started), *of_weights


class _Multiply(Function):
    """`torch.nn.functional.linear`, and what `_compat.local` does to the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, left: Left | None, number: int) -> Tensor:
        local, ctx.spec = (weight._local_tensor, weight._spec) if isinstance(weight, DTensor) else (weight, None)
        ctx.left, ctx.number = left, number
        ctx.save_for_backward(x, local)
        return functional.linear(x, local, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_backward()
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        rows = _rows(grad)
        of_x = (rows @ weight).view(x.shape) if for_x else None
        of_weight = None
        if for_weight and ctx.left is not None:
            ctx.left.add(ctx.number, rows, x)
        elif for_weight:
            of_weight = _weight_gradient(rows, x)
            of_weight = _compat.laid_out(of_weight, ctx.spec) if ctx.spec else of_weight
        return of_x, of_weight, rows.sum(0) if for_bias else None, None, None


def _weight_gradient(rows: Tensor, x: Tensor) -> Tensor:
    """(tokens, out), (..., in) -> (out, in)."""
    return rows.t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
