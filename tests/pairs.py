"""Pairwise selection of settings, by allpairspy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from allpairspy import AllPairs


def pairwise(allowed: Callable[..., bool] = lambda **_: True, **settings: list[Any]) -> Iterator[dict[str, Any]]:
    """Combinations of ``settings`` in which every allowed pair of values of two settings occurs."""
    names = list(settings)

    def holds(values: list[Any]) -> bool:  # also asked about the first few values only
        return allowed(**dict(zip(names, values, strict=False)))

    return (dict(zip(names, values, strict=True)) for values in AllPairs(list(settings.values()), filter_func=holds))
