"""The table of collectives, entry by entry: what runs forward, and its mirror backward."""

from __future__ import annotations

import pytest

from shardplan.edges import GATHER_FOR_HEAD, HEAD_AFTER_GATHER, Collective, UnsupportedConversionError, lower_edge
from shardplan.layouts import parse_conversion

SEQUENCE = 1

# conversion: (stream whole, stream cut), for a reader that needs the whole of it, then for one that reads in parts.
TABLE = {
    "replicate": (None, None, ("identity", "all_reduce"), ("identity", "all_reduce")),
    "stream": (None, None, ("identity", "all_reduce"), None),
    "partial": (None, None, None, None),
    "shard(-1)": (None, None, None, None),
    "stream -> replicate": (
        None, ("all_gather", "chunk"),
        ("identity", "all_reduce"), ("all_gather", "reduce_scatter"),
    ),
    "replicate -> stream": (None, ("chunk", "all_gather"), ("identity", "all_reduce"), ("chunk", "all_gather")),
    "partial -> stream": (
        ("all_reduce", "identity"), ("reduce_scatter", "all_gather"),
        ("all_reduce", "identity"), ("reduce_scatter", "all_gather"),
    ),
    "partial -> replicate": (("all_reduce", "identity"),) * 4,
    "shard(-1) -> replicate": (("all_gather", "chunk"),) * 2 + (("all_gather", "reduce_scatter"),) * 2,
    "replicate -> shard(-1)": (("chunk", "all_gather"),) * 4,
}  # fmt: skip


@pytest.mark.parametrize("text", TABLE)
def test_a_conversion_has_its_collectives(text: str) -> None:
    for in_parts, (whole, cut) in zip((False, True), (TABLE[text][:2], TABLE[text][2:]), strict=True):
        edge = lower_edge(parse_conversion(text), read_in_parts=in_parts)
        names = [(c.forward, c.backward) if c else None for c in (edge.in_mode(False), edge.in_mode(True))]
        assert names == [whole, cut], f"in parts: {in_parts}"


def test_a_collective_runs_along_the_dim_that_is_cut() -> None:
    def dim(text: str, sequence_parallel: bool) -> int | None:
        collective = lower_edge(parse_conversion(text), read_in_parts=False).in_mode(sequence_parallel)
        return collective.dim if collective else None

    assert dim("partial -> stream", True) == dim("stream -> replicate", True) == SEQUENCE
    assert dim("shard(-1) -> replicate", False) == dim("replicate -> shard(-1)", False) == -1


@pytest.mark.parametrize(
    "text", ["replicate -> partial", "shard(-1) -> partial", "shard(0) -> shard(1)", "shard(-1) -> stream"]
)
def test_what_has_no_collective_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedConversionError, match="there is no collective from "):
        lower_edge(parse_conversion(text), read_in_parts=False)


def test_what_a_collective_sends() -> None:
    assert Collective("identity", "all_reduce").sends == {"backward": "all_reduce"}
    assert Collective("chunk", "all_gather").sends == {"backward": "all_gather"}
    assert Collective("all_gather", "reduce_scatter").sends == {"forward": "all_gather", "backward": "reduce_scatter"}
    # The head's gradient is summed once: where the stream is gathered, not where the head reads it.
    assert GATHER_FOR_HEAD.sends == {"forward": "all_gather", "backward": "reduce_scatter"}
    assert HEAD_AFTER_GATHER.sends == {}
