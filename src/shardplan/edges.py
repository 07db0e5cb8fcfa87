"""Conversions lowered to collectives: what runs at an edge in the forward, and its mirror in the backward.

Outside blocks every activation's gradient is complete: it is the same on all ranks of a tp group, and it is the whole
gradient. So whoever uses an activation in parts (a block, a column-wise linear) adds its input gradient up over tp
itself, and any number of readers may share one activation. Edges are Megatron-LM's f and g (Shoeybi et al. 2019) and,
with sequence parallelism, the gather and scatter of Korthikanti et al. 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.layouts import Conversion


@dataclass(frozen=True, slots=True)
class Part:
    """So many features side by side, as one rank has them, and whether an edge converts them."""

    width: int
    converted: bool


@dataclass(frozen=True, slots=True)
class Collective:
    """The two directions of one edge, by the names that `shardplan.parallel.collectives` gives them, along ``dim``.

    Attributes:
        within: only so many neighbouring ranks take part; None stands for all of tp.
        parts: the activation's last dim consists of these, and only some of them are converted, each by itself.
    """

    forward: str
    backward: str
    dim: int = 0
    within: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def calls(self) -> int:
        """How often a direction that sends does so."""
        return sum(part.converted for part in self.parts) if self.parts else 1

    @property
    def sends(self) -> dict[str, str]:
        """The collective behind each direction that sends anything."""
        directions = {"forward": self.forward, "backward": self.backward}
        return {direction: SENDING[name] for direction, name in directions.items() if name in SENDING}


# Operations that communicate, and the collective that they are.
SENDING = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_mean": "reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class Edge:
    """What a module does to its input or output: ``cut`` while the residual stream is sharded, ``whole`` otherwise."""

    conversion: Conversion
    whole: Collective | None
    cut: Collective | None

    def in_mode(self, sequence_parallel: bool) -> Collective | None:
        return self.cut if sequence_parallel else self.whole


class UnsupportedConversionError(ValueError):
    """A conversion for which no collective is defined."""


# (source, target) -> forward, backward; the second table is for readers that use what they get in parts.
_CONVERSIONS = {
    ("replicate", "replicate"): None,
    ("partial", "partial"): None,
    ("shard", "replicate"): ("all_gather", "chunk"),
    ("replicate", "shard"): ("chunk", "all_gather"),
    ("partial", "replicate"): ("all_reduce", "identity"),
    ("partial", "shard"): ("reduce_scatter", "all_gather"),
}
_CONVERSIONS_FOR_PARTS = {
    ("replicate", "replicate"): ("identity", "all_reduce"),
    ("shard", "replicate"): ("all_gather", "reduce_scatter"),
}


def lower_edge(conversion: Conversion, *, read_in_parts: bool) -> Edge:
    """Find the collectives of ``conversion`` in both modes.

    Args:
        conversion: the layouts before and after.
        read_in_parts: whether the reader behind the edge uses the result in parts, so that its gradients
            add up over tp.

    Raises:
        UnsupportedConversionError: no collective leads from one layout to the other.
    """
    return Edge(
        conversion,
        whole=_collective(conversion, read_in_parts, sequence_parallel=False),
        cut=_collective(conversion, read_in_parts, sequence_parallel=True),
    )


# The gather behind the final norm and the head are coupled: the head leaves its input gradient partial, scaled by tp,
# and the gather's backward averages it. Another reader's complete gradient passes the same average unchanged.
GATHER_FOR_HEAD = Collective("all_gather", "reduce_scatter_mean", dim=1)
HEAD_AFTER_GATHER = Collective("identity", "multiply")


def _collective(conversion: Conversion, read_in_parts: bool, *, sequence_parallel: bool) -> Collective | None:
    source = conversion.source.resolved(sequence_parallel)
    target = conversion.target.resolved(sequence_parallel)
    if source == target and source.kind == "shard":
        return None
    key = (source.kind, target.kind)
    table = {**_CONVERSIONS, **_CONVERSIONS_FOR_PARTS} if read_in_parts else _CONVERSIONS
    if key not in table:
        raise UnsupportedConversionError(f"there is no collective from {source} to {target}")
    pair = table[key]
    dim = source.dim if source.dim is not None else target.dim
    return Collective(*pair, dim=dim or 0) if pair else None
