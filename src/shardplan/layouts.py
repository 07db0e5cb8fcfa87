"""How an activation lies over the tp axis, and the conversions that a plan may write: ``partial -> stream``."""

from __future__ import annotations

import re
from dataclasses import dataclass

SEQUENCE_DIM = 1  # of a (batch, sequence, hidden) activation


@dataclass(frozen=True, slots=True)
class Layout:
    """``replicate``, ``partial``, ``stream`` or ``shard(dim)``.

    ``stream`` is the layout of the residual stream: ``replicate``, or ``shard(1)`` while sequence parallelism cuts it.
    """

    kind: str
    dim: int | None = None

    def __str__(self) -> str:
        return self.kind if self.dim is None else f"{self.kind}({self.dim})"

    def resolved(self, sequence_parallel: bool) -> Layout:
        """The layout with ``stream`` replaced by what it means in that mode."""
        if self.kind != "stream":
            return self
        return shard(SEQUENCE_DIM) if sequence_parallel else REPLICATE


REPLICATE = Layout("replicate")
PARTIAL = Layout("partial")
STREAM = Layout("stream")


def shard(dim: int) -> Layout:
    """The layout in which each rank holds its chunk of ``dim``."""
    return Layout("shard", dim)


@dataclass(frozen=True, slots=True)
class Conversion:
    """``source -> target`` at one edge of a module; equal ends mean a layout that is stated, not changed."""

    source: Layout
    target: Layout

    def __str__(self) -> str:
        return str(self.source) if self.source == self.target else f"{self.source} -> {self.target}"


_LAYOUT = re.compile(r"(replicate|partial|stream)|shard\(\s*(-?\d+)\s*\)")

# The same language for the JSON Schema; it accepts exactly what `parse_conversion` does.
_LAYOUT_REGEX = r"(replicate|partial|stream|shard\( *-?[0-9]+ *\))"
CONVERSION_REGEX = rf"^ *{_LAYOUT_REGEX}( *-> *{_LAYOUT_REGEX})? *$"


def parse_layout(text: str) -> Layout:
    """Read one layout word.

    Raises:
        ValueError: ``text`` is none of replicate, partial, stream, shard(N).
    """
    match = _LAYOUT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text.strip()}' is not a layout: write replicate, partial, stream or shard(N)")
    word, dim = match.groups()
    return Layout(word) if word else shard(int(dim))


def parse_conversion(text: str) -> Conversion:
    """Read ``a -> b``, or ``a`` alone, which states a layout without changing it.

    Raises:
        ValueError: an end is no layout, or there are more than two.
    """
    ends = [parse_layout(end) for end in text.split("->")]
    if len(ends) > 2:
        raise ValueError(f"'{text}' has more than one '->': write one conversion, source -> target")
    return Conversion(ends[0], ends[-1])
