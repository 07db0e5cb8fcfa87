"""Operations on tensors that are not there give, part by part, what they give on tensors that are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardplan.checkpoint.lazy import Box, LazyTensor, Source, lazy

A, B = torch.arange(24.0).view(4, 6), torch.arange(24.0, 48.0).view(4, 6)

MOVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "experts": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "chunk": lambda a, b: torch.chunk(torch.stack([a, b], -1), 3, dim=1)[2].contiguous(),
    "chunk and squeeze": lambda a, b: torch.stack([torch.chunk(a, 4)[2].squeeze(0), b[1]])[None],
    "split": lambda a, b: torch.stack([torch.split(a, [2, 4], dim=-1)[1]] * 2),
    "transpose": lambda a, b: torch.stack([a, b]).transpose(0, 2).contiguous(),
    "slice": lambda a, b: torch.stack([a, b])[:, 1:3],
    "cast": lambda a, b: torch.stack([a, b]).to(torch.bfloat16),
    "parameter": lambda a, b: torch.nn.Parameter(torch.stack([a, b])).detach(),
}
COMPUTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rope": lambda a, b: a.view(2, 2, 6).transpose(1, 2).reshape(6, 2, 2) * 2,
    "steps": lambda a, b: torch.stack([a, b])[:, ::2],
    "several": lambda a, b: torch.stack(torch.var_mean(torch.stack([a, b]), dim=0))[:, :, None],
}


class InMemory(Source):
    """Values, and how many of them were read."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.read = values, 0

    def read_into(self, box: Box, out: Tensor) -> None:
        self.read += out.numel()
        out.copy_(self.values[box])


def sources() -> tuple[list[InMemory], list[LazyTensor]]:
    held = [InMemory(values) for values in (A, B)]
    return held, [lazy(tuple(source.values.shape), source.values.dtype, source) for source in held]


@pytest.mark.parametrize("name", [*MOVES, *COMPUTATIONS])
def test_whole_and_in_part(name: str) -> None:
    function = {**MOVES, **COMPUTATIONS}[name]
    expected = function(A, B)
    _, tensors = sources()
    actual = function(*tensors)
    assert isinstance(actual, LazyTensor)
    assert (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert torch.equal(actual.read(), expected)
    box = tuple(slice(length // 3, length - length // 3) for length in expected.shape)
    part = torch.empty([along.stop - along.start for along in box], dtype=expected.dtype)
    actual.read_into(box, part)
    assert torch.equal(part, expected[box])


@pytest.mark.parametrize("name", MOVES)
def test_nothing_is_read_that_is_not_asked_for(name: str) -> None:
    held, tensors = sources()
    actual: LazyTensor = MOVES[name](*tensors)  # type: ignore[assignment]
    assert sum(source.read for source in held) == 0
    actual.read_into((slice(0, 1), slice(0, 1), slice(0, 1)), torch.empty(1, 1, 1))
    assert sum(source.read for source in held) == 1


def test_an_empty_part_is_not_asked_for() -> None:
    held, (first, _) = sources()
    first.read_into((slice(4, 4), slice(0, 6)), torch.empty(0, 6))
    assert held[0].read == 0


def test_values_are_cast_once() -> None:
    """Through bfloat16, 1 + 2^-20 would be 1."""
    precise = torch.tensor([[[1 + 2.0**-20]]])
    tensor = lazy((1, 1, 1), torch.float32, InMemory(precise)).to(torch.bfloat16)
    out = torch.empty(1, 1, 1)
    tensor.read_into((slice(0, 1),) * 3, out)  # type: ignore[attr-defined]
    assert torch.equal(out, precise)
