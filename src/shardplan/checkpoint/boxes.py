"""Where in the whole tensor lies what a rank holds of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from torch import Tensor

from shardplan.checkpoint.lazy import Box
from shardplan.weights import local, own_box


def boxes(parts: Sequence[Tensor], dim: int) -> Iterator[tuple[Box, Tensor]]:
    """Of a tensor that is kept in ``parts``, side by side along ``dim``: this rank's box of each, and its values."""
    ends = accumulate(part.shape[dim] if part.ndim else 0 for part in parts)
    for part, end in zip(parts, ends, strict=True):
        box = own_box(part)
        if len(parts) > 1:
            start, along = end - part.shape[dim], box[dim]
            box = (*box[:dim], slice(along.start + start, along.stop + start), *box[dim + 1 :])
        yield box, local(part)
