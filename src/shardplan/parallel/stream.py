"""The residual stream at run time: whether this forward cuts it, and that its recomputation does the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardplan.edges import Edge
from shardplan.layouts import SEQUENCE_DIM
from shardplan.parallel.collectives import STARTED, Ranks, convert
from shardplan.parallel.multiply import builds_own_graph, can_be_read_ahead, read_ahead


@dataclass
class Stream:
    """State of the forward (or recomputation) that is running.

    Attributes:
        ranks: the tp group.
        sequence_parallel: whether forwards cut the stream when they can.
        cut_by_embedding: whether the model sees a cut embedding output, from which it cannot build a mask.
        cut: whether the running one does.
        length: its full sequence length.
        neighbours: the groups of so many neighbouring tp ranks.
    """

    ranks: Ranks
    sequence_parallel: bool
    cut_by_embedding: bool = False
    cut: bool = False
    length: int = 0
    neighbours: Mapping[int, Ranks] = field(default_factory=dict)

    def convert(self, x: Tensor, edge: Edge, linears: Iterable[Any] = ()) -> Tensor:
        """Run ``edge`` in the mode of the running forward.

        Args:
            linears: those that read the result; the gradients of their weights are made while that of ``x`` is summed.
        """
        collective = edge.cut if self.cut else edge.whole
        if collective is None:
            return x
        ranks = self.neighbours[collective.within] if collective.within else self.ranks
        if not collective.parts:
            ahead = [linear for linear in linears if can_be_read_ahead(linear)] if builds_own_graph(x) else []
            if not ahead or collective.backward not in STARTED or not x.requires_grad:
                return convert(x, collective, ranks)
            return convert(read_ahead(x, ahead), collective, ranks, waited=False)
        parts = zip(x.split([part.width for part in collective.parts], -1), collective.parts, strict=True)
        return torch.cat([convert(piece, collective, ranks) if part.converted else piece for piece, part in parts], -1)


def begin(stream: Stream, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Decide for one forward; runs before the decoder's, outside any recomputed region.

    The stream stays whole where tp does not divide the sequence, where the caller asks for the hidden states of every
    layer, and where padding or packing needs a mask that the model would build from a cut embedding output.
    """
    stream.length = _sequence_length(args, kwargs)
    divides = stream.length > 0 and stream.length % stream.ranks.size == 0
    asks_for_layers = kwargs.get("output_hidden_states") or getattr(
        getattr(decoder, "config", None), "output_hidden_states", False
    )
    needs_whole = asks_for_layers or (stream.cut_by_embedding and _may_need_mask(kwargs))
    stream.cut = stream.sequence_parallel and divides and not needs_whole


def _may_need_mask(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("attention_mask") is not None or kwargs.get("position_ids") is not None


def full_positions(
    stream: Stream, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand position tables the positions of the full sequence where the model counted those of a part.

    Positions are ``position_ids`` by name, or the second argument: (batch or 1, sequence).
    """
    by_name = "position_ids" in kwargs
    ids = kwargs["position_ids"] if by_name else args[1] if len(args) > 1 else None
    if not stream.cut or not isinstance(ids, Tensor) or ids.shape[-1] * stream.ranks.size != stream.length:
        return args, kwargs
    full = ids[..., :1] + torch.arange(stream.length, device=ids.device, dtype=ids.dtype)
    return (args, {**kwargs, "position_ids": full}) if by_name else ((args[0], full, *args[2:]), kwargs)


def _sequence_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the ids or embeddings that the decoder is called with; 0 where it is called with neither."""
    inputs = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    first = next((x for x in inputs if isinstance(x, Tensor)), None)
    return 0 if first is None or first.ndim <= SEQUENCE_DIM else first.shape[SEQUENCE_DIM]


class _Recall(Function):
    """Identity whose backward, the first in the stream, restores the mode for the recomputations that follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Stream) -> Tensor:
        ctx.stream, ctx.cut = stream, stream.cut
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stream.cut = ctx.cut
        return grad, None


def end(stream: Stream, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Runs after the module at whose output the stream ends."""
    recalled: Tensor = _Recall.apply(output, stream)
    return recalled
