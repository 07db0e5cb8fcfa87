"""Modules that read their own parameters as local tensors.

Parameters are DTensors for FSDP2, optimizers, clipping and checkpoints, which all reach them by ``getattr``. Inside the
owner's ``forward`` the same names give the local tensor. It is a subclass and not a pair of hooks, because a
recomputation calls ``forward`` without the module's hooks and leaves it by an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan import _compat
from shardplan.class_source import methods_reading
from shardplan.compiled import CompiledModule, CompiledParameter
from shardplan.parallel.collectives import ScaleGradient, ScaleValue
from shardplan.parallel.multiply import Ahead, local_product
from shardplan.parallel.stream import Stream
from shardplan.styles import Gradient

Reader = Callable[[Tensor], Tensor]


class ReadsLocally:
    """Mixin in front of a module's class: ``self.weight`` is local while ``forward`` runs.

    And while other methods do that read weights: Gemma 3n's layers call ``predict`` and ``correct`` of a child.

    So are the weights of its direct children, whose forward need not run at all: `torch.nn.MultiheadAttention` and
    fused kernels hand ``self.out_proj.weight`` to a function.
    """

    tp_sections: dict[str, tuple[int, tuple[str, ...]]]  # packed parameters: the dim, and the names of its sections
    tp_readers: dict[str, Reader]
    tp_summed: dict[str, Tensor | None]  # local views whose gradients are summed over tp, where no FSDP2 unit does it
    tp_reading = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(super().forward, *args, **kwargs)  # type: ignore[misc]  # a mixin: nn.Module is behind it

    def _compute(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        readers = [reader for reader in (self, *self._children()) if not reader.tp_reading]
        for reader in readers:
            object.__setattr__(reader, "tp_reading", True)  # nn.Module's own takes longer than all the rest of this
        try:
            return method(*args, **kwargs)
        finally:
            for reader in readers:
                object.__setattr__(reader, "tp_reading", False)

    def _children(self) -> list[ReadsLocally]:
        children: dict[str, Any] = self._modules  # type: ignore[attr-defined]  # nn.Module's
        return [child for child in children.values() if isinstance(child, ReadsLocally)] if children else []

    def _local_parameter(self, name: str) -> Tensor | None:
        """This rank's part of a parameter, whether or not ``forward`` runs."""
        parameter = self._parameters[name]  # type: ignore[attr-defined]  # nn.Module's
        if name not in self.tp_readers:
            return parameter  # type: ignore[no-any-return]  # no tensor, or not in the plan
        summed = self.tp_summed.get(name)
        return self.tp_readers[name](_local(parameter) if summed is None else summed)


class JoinsSections(ReadsLocally):
    """Also owns packed parameters, which lie in sections and are joined while ``forward`` runs."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("tp_sections", ()):
            _, stored = self.tp_sections[name]
            raise AttributeError(f"{name} is kept as {', '.join(stored)}; shardplan.hf_state_dict gives it whole")
        return super().__getattr__(name)  # type: ignore[misc]  # nn.Module's


class Multiplies(ReadsLocally):
    """A Linear whose weight is cut."""

    _parameters: dict[str, Any]
    tp_ahead: Ahead | None = None  # its weight, where the block around it has read it for the forward to come

    def forward(self, x: Tensor) -> Tensor:
        ahead = self.tp_ahead
        if ahead is not None:
            object.__setattr__(self, "tp_ahead", None)
        return local_product(x, self._parameters["weight"], self._local_parameter("bias"), ahead)


class MultipliesSections(JoinsSections):
    """A column-wise Linear: one product for each section.

    A joined weight would live until the backward, and FSDP2, which frees the sections after the forward, could not
    free it.
    """

    def forward(self, x: Tensor) -> Tensor:
        weights = self._sections("weight")
        biases: Sequence[Tensor | None] = self._sections("bias") or [None] * len(weights)
        products = [nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        return torch.cat(products, dim=-1)

    def _sections(self, name: str) -> list[Tensor]:
        """Empty where there is no bias."""
        _, stored = self.tp_sections.get(name, (0, ()))
        return [_local(self._parameters[section]) for section in stored]


class ReadsOwnRows(ReadsLocally):
    """An Embedding that holds a range of the rows; ids of other ranks' rows contribute zero to the sum over tp."""

    tp_first_row: int
    tp_rows: int

    def forward(self, ids: Tensor) -> Any:
        rows = ids - self.tp_first_row
        elsewhere = (rows < 0) | (rows >= self.tp_rows)
        return super().forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)


def read_locally(module: Any, compiled: CompiledModule, stream: Stream | None) -> None:
    """Turn ``module``, whose parameters are in place by now, into one that reads them locally.

    Without a stream there is no tp: all that is done is to join the sections of packed parameters.
    """
    names = tuple(parameter.name for parameter in compiled.parameters)
    splits_vocabulary = stream is not None and compiled.splits_vocabulary
    module.tp_summed = {}
    module.tp_sections = {p.name: (p.placement.dim, p.stored_names) for p in compiled.parameters if p.sections}
    module.tp_readers = {p.name: _reader(p, stream) if stream else _as_it_is for p in compiled.parameters}
    if splits_vocabulary and stream:
        _number_rows(module, stream)
    mixin: type = ReadsOwnRows if splits_vocabulary else _mixin(module, compiled)
    module.__class__ = _local_class(module.__class__, mixin, names)


def _mixin(module: Any, compiled: CompiledModule) -> type:
    multiplies = type(module).forward is nn.Linear.forward
    if not module.tp_sections:
        return Multiplies if multiplies and compiled.cuts_weight else ReadsLocally
    dim, _ = module.tp_sections.get("weight", (None, ()))
    return MultipliesSections if multiplies and dim == 0 else JoinsSections


@cache
def _local_class(cls: type, mixin: type, names: tuple[str, ...]) -> type:
    properties = {name: property(partial(_read, name)) for name in names}
    methods = {name: _computing(getattr(cls, name)) for name in methods_reading(cls, names)}
    return type(f"Local{cls.__name__}", (mixin, cls), {**properties, **methods, "__module__": cls.__module__})


def _computing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(module: ReadsLocally, *args: Any, **kwargs: Any) -> Any:
        return module._compute(partial(method, module), *args, **kwargs)

    return run


def _read(name: str, module: Any) -> Any:
    if name in module.tp_sections:
        return _joined(name, module)
    return module._local_parameter(name) if module.tp_reading else module._parameters[name]


def _joined(name: str, module: Any) -> Tensor:
    """This rank's part of every section, side by side, as the module's own forward knows them."""
    if not module.tp_reading:
        raise AttributeError(name)
    dim, stored = module.tp_sections[name]
    return torch.cat([_local(module._parameters[section]) for section in stored], dim)


def _local(parameter: Any) -> Tensor:
    """FSDP2 has put plain tensors in the place of parameters that only dp shards."""
    part: Tensor = _compat.local(parameter) if isinstance(parameter, DTensor) else parameter
    return part


def _reader(parameter: CompiledParameter, stream: Stream) -> Reader:
    if parameter.added_once:
        return partial(_share, 1 / stream.ranks.size)
    if parameter.gradient is Gradient.STREAM and stream.sequence_parallel:
        return partial(_complete_when_whole, stream)
    return _as_it_is


def _as_it_is(local: Tensor) -> Tensor:
    return local


def _share(factor: float, local: Tensor) -> Tensor:
    share: Tensor = ScaleValue.apply(local, factor)
    return share


def _complete_when_whole(stream: Stream, local: Tensor) -> Tensor:
    """While the stream is whole the gradient is complete on every rank, and the sum over tp would count it tp times."""
    if stream.cut:
        return local
    scaled: Tensor = ScaleGradient.apply(local, 1 / stream.ranks.size)
    return scaled


def _number_rows(module: Any, stream: Stream) -> None:
    """DTensor's chunks: all of ceil(n / tp) rows but the last ones, which may have fewer."""
    weight = module._parameters["weight"]
    module.tp_first_row = stream.ranks.rank * -(-module.num_embeddings // stream.ranks.size)
    module.tp_rows = weight.to_local().shape[0]
    if module.padding_idx is not None:  # F.embedding reads it as a row of the local weight
        row = module.padding_idx - module.tp_first_row
        module.padding_idx = row if 0 <= row < module.tp_rows else None
