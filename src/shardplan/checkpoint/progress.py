"""A bar on one rank, where someone looks at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def tracked(items: Sequence[T], what: str, *, shown: bool) -> Iterator[T]:
    """Go through ``items`` with a progress bar on standard error, where ``shown`` and where that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, console=Console(stderr=True))
