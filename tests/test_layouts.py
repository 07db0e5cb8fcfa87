"""Layout words and conversions, as a plan writes them."""

from __future__ import annotations

import re

import pytest

from shardplan.layouts import (
    CONVERSION_REGEX,
    PARTIAL,
    REPLICATE,
    STREAM,
    Conversion,
    parse_conversion,
    parse_layout,
    shard,
)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("replicate", REPLICATE),
        ("partial", PARTIAL),
        (" stream ", STREAM),
        ("shard(1)", shard(1)),
        ("shard( -1 )", shard(-1)),
    ],
)
def test_a_layout_is_read(text: str, layout: object) -> None:
    assert parse_layout(text) == layout


@pytest.mark.parametrize(
    "text", ["", "Replicate", "shard", "shard()", "shard(a)", "shard(1", "shard(1.0)", "stream(1)"]
)
def test_anything_else_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match="is not a layout: write replicate, partial, stream or shard"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "conversion", "spoken"),
    [
        ("stream->replicate", Conversion(STREAM, REPLICATE), "stream -> replicate"),
        ("partial -> shard(1)", Conversion(PARTIAL, shard(1)), "partial -> shard(1)"),
        ("shard(-1)", Conversion(shard(-1), shard(-1)), "shard(-1)"),
    ],
)
def test_a_conversion_is_read_and_spoken(text: str, conversion: Conversion, spoken: str) -> None:
    assert parse_conversion(text) == conversion
    assert str(conversion) == spoken
    assert parse_conversion(spoken) == conversion
    assert re.search(CONVERSION_REGEX, text)


def test_one_conversion_at_a_time() -> None:
    with pytest.raises(ValueError, match="more than one '->'"):
        parse_conversion("partial -> replicate -> stream")


def test_only_the_stream_depends_on_the_mode() -> None:
    assert (STREAM.resolved(False), STREAM.resolved(True)) == (REPLICATE, shard(1))
    for layout in (REPLICATE, PARTIAL, shard(0), shard(-1)):
        assert layout.resolved(True) == layout.resolved(False) == layout
