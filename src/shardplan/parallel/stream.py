"""The residual stream at run time: whether this forward cuts it, and that its recomputation does the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from shardplan.edges import Edge
from shardplan.layouts import SEQUENCE_DIM
from shardplan.parallel.collectives import Ranks, convert


@dataclass
class Stream:
    """State of the forward (or recomputation) that is running.

    Attributes:
        ranks: the tp group.
        sequence_parallel: whether forwards cut the stream when they can.
        cut: whether the running one does.
    """

    ranks: Ranks
    sequence_parallel: bool
    cut: bool = False

    def convert(self, x: Tensor, edge: Edge) -> Tensor:
        """Run ``edge`` in the mode of the running forward."""
        collective = edge.cut if self.cut else edge.whole
        return x if collective is None else convert(x, collective, self.ranks)


def begin(stream: Stream, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Decide for one forward; runs before the decoder's, outside any recomputed region.

    The stream stays whole where tp does not divide the sequence, and where the caller asks for the hidden states
    of every layer, which must be whole too.
    """
    length = _sequence_length(args, kwargs)
    divides = length is not None and length % stream.ranks.size == 0
    asks_for_layers = kwargs.get("output_hidden_states") or getattr(
        getattr(decoder, "config", None), "output_hidden_states", False
    )
    stream.cut = stream.sequence_parallel and divides and not asks_for_layers


def _sequence_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    inputs = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    first = next((x for x in inputs if isinstance(x, Tensor)), None)
    return None if first is None or first.ndim <= SEQUENCE_DIM else first.shape[SEQUENCE_DIM]


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
