"""Tensors that are not there yet: what transformers' conversions do to them is written down, and run part by part.

Its conversions stack experts, join and split projections, and swap dims. On these tensors such an operation moves
nothing. Whoever needs a part asks for that part alone, and it is read piece by piece from where it lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import accumulate, count
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Box = tuple[slice, ...]  # start and stop along each dim
aten = torch.ops.aten


class Source(ABC):
    """Where the values of a lazy tensor come from."""

    @abstractmethod
    def read_into(self, box: Box, out: Tensor) -> None:
        """Copy the values of ``box`` into ``out``, which has its shape; ``out`` on the meta device takes nothing."""


class LazyTensor(Tensor):
    """A tensor with a shape and a dtype, whose values are read from ``source`` when asked for."""

    source: Source

    @staticmethod
    def __new__(cls, like: Tensor, source: Source) -> LazyTensor:
        """``like`` is a meta tensor of the same shape, strides and dtype."""
        lazy: LazyTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        lazy.source = source
        return lazy

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes options
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves its own without types
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        meta = func(*tree_map(_meta, args), **{**tree_map(_meta, kwargs), **_on_meta(kwargs)})
        sources = iter(_sources(func, args, kwargs))
        return tree_map(lambda like: cls(like, next(sources)) if isinstance(like, Tensor) else like, meta)

    def read_into(self, box: Box, out: Tensor) -> None:
        """Copy a part of the values; the one cast is that to the dtype of ``out``."""
        if prod(out.shape):
            self.source.read_into(box, out)

    def read(self) -> Tensor:
        """All values, on the CPU."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole(self.shape), out)
        return out


def lazy(shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> LazyTensor:
    """A tensor whose values lie in ``source`` as they are."""
    return LazyTensor(torch.empty(shape, dtype=dtype, device="meta"), source)


def origins(tensor: LazyTensor) -> Iterator[LazyTensor]:
    """The tensors whose values end up in this one as they are, but for a cast; itself, where it is computed or read."""
    source: Any = tensor.source
    values = [] if isinstance(source, _Computed) else [getattr(source, field.name) for field in fields(source)]
    inner = [value for value in tree_leaves(values) if isinstance(value, LazyTensor)]
    if not inner:
        yield tensor
    for value in inner:
        yield from origins(value)


def whole(shape: tuple[int, ...] | torch.Size) -> Box:
    return tuple(slice(0, length) for length in shape)


def _meta(value: Any) -> Any:
    if not isinstance(value, LazyTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}


def _sources(func: Any, args: Any, kwargs: Any) -> Iterator[Source]:
    """The sources of all that ``func`` returns, in order."""
    if func in _MOVES:
        yield from _MOVES[func](*args, **kwargs)
    else:
        call = _Call(func, args, kwargs)
        yield from (_Computed(call, number) for number in count())


# ---------------------------------------------------------------- what moves values


@dataclass(frozen=True, slots=True)
class _Same(Source):
    """The values of another, whatever its dtype: a cast on the way would round twice."""

    of: LazyTensor

    def read_into(self, box: Box, out: Tensor) -> None:
        self.of.read_into(box, out)


@dataclass(frozen=True, slots=True)
class _Joined(Source):
    """Side by side along ``dim``."""

    parts: tuple[LazyTensor, ...]
    dim: int

    def read_into(self, box: Box, out: Tensor) -> None:
        wanted, dim = box[self.dim], self.dim
        for part, end in zip(self.parts, accumulate(part.shape[dim] for part in self.parts), strict=True):
            begin = end - part.shape[dim]
            start, stop = max(wanted.start, begin), min(wanted.stop, end)
            if start < stop:
                inner = (*box[:dim], slice(start - begin, stop - begin), *box[dim + 1 :])
                part.read_into(inner, out.narrow(dim, start - wanted.start, stop - start))


@dataclass(frozen=True, slots=True)
class _Cut(Source):
    """From ``start`` on along ``dim``."""

    of: LazyTensor
    dim: int
    start: int

    def read_into(self, box: Box, out: Tensor) -> None:
        along = box[self.dim]
        moved = slice(along.start + self.start, along.stop + self.start)
        self.of.read_into((*box[: self.dim], moved, *box[self.dim + 1 :]), out)


@dataclass(frozen=True, slots=True)
class _Widened(Source):
    """With a dim of length one at ``dim``."""

    of: LazyTensor
    dim: int

    def read_into(self, box: Box, out: Tensor) -> None:
        self.of.read_into((*box[: self.dim], *box[self.dim + 1 :]), out.squeeze(self.dim))


@dataclass(frozen=True, slots=True)
class _Picked(Source):
    """One entry along ``dim``, which is gone."""

    of: LazyTensor
    dim: int
    index: int

    def read_into(self, box: Box, out: Tensor) -> None:
        inner = (*box[: self.dim], slice(self.index, self.index + 1), *box[self.dim :])
        self.of.read_into(inner, out.unsqueeze(self.dim))


@dataclass(frozen=True, slots=True)
class _Swapped(Source):
    """With two dims in each other's place."""

    of: LazyTensor
    first: int
    second: int

    def read_into(self, box: Box, out: Tensor) -> None:
        inner = list(box)
        inner[self.first], inner[self.second] = inner[self.second], inner[self.first]
        self.of.read_into(tuple(inner), out.transpose(self.first, self.second))


def _same(of: LazyTensor, *_args: Any, **_kwargs: Any) -> Iterator[Source]:
    yield _Same(of)


def _cat(tensors: list[LazyTensor], dim: int = 0) -> Iterator[Source]:
    yield _Joined(tuple(tensors), dim % tensors[0].ndim)


def _stack(tensors: list[LazyTensor], dim: int = 0) -> Iterator[Source]:
    dim %= tensors[0].ndim + 1
    yield _Joined(tuple(tensor.unsqueeze(dim) for tensor in tensors), dim)  # type: ignore[misc]  # lazy like its source


def _split(of: LazyTensor, lengths: int | list[int], dim: int = 0) -> Iterator[Source]:
    total = of.shape[dim]
    starts = range(0, max(total, 1), lengths) if isinstance(lengths, int) else [0, *accumulate(lengths[:-1])]
    yield from (_Cut(of, dim % of.ndim, start) for start in starts)


def _slice(
    of: LazyTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Iterator[Source]:
    begin, end, step = slice(start, stop, step).indices(of.shape[dim])
    if step == 1:
        yield _Cut(of, dim % of.ndim, begin)
    else:
        yield _Computed(_Call(aten.slice.Tensor, (of, dim, begin, end, step), {}), 0)


def _select(of: LazyTensor, dim: int, index: int) -> Iterator[Source]:
    yield _Picked(of, dim % of.ndim, index % of.shape[dim])


def _unsqueeze(of: LazyTensor, dim: int) -> Iterator[Source]:
    yield _Widened(of, dim % (of.ndim + 1))


def _squeeze(of: LazyTensor, dim: int) -> Iterator[Source]:
    dim %= of.ndim
    yield _Picked(of, dim, 0) if of.shape[dim] == 1 else _Same(of)


def _transpose(of: LazyTensor, first: int, second: int) -> Iterator[Source]:
    yield _Swapped(of, first % of.ndim, second % of.ndim)


_MOVES: dict[Any, Callable[..., Iterator[Source]]] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten._to_copy.default: _same,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.transpose.int: _transpose,
}


# ---------------------------------------------------------------- whatever else is done to them


@dataclass(frozen=True, slots=True)
class _Call:
    func: Any
    args: Any
    kwargs: Any

    def run(self) -> list[Any]:
        """On the values, all of them."""
        read = lambda value: value.read() if isinstance(value, LazyTensor) else value  # noqa: E731
        results = self.func(*tree_map(read, self.args), **tree_map(read, self.kwargs))
        return [result for result in tree_leaves(results) if isinstance(result, Tensor)]


@dataclass(frozen=True, slots=True)
class _Computed(Source):
    """One result of an operation that does not only move values: its arguments are read as a whole."""

    call: _Call
    number: int

    def read_into(self, box: Box, out: Tensor) -> None:
        out.copy_(self.call.run()[self.number][box])
