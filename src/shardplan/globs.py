"""The regular expressions behind patterns: tokens, globs and ranges of integers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache


@lru_cache(maxsize=8192)
def path_regex(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Matches an fqn with a dot after each of its tokens; ``""`` is the model itself."""
    runs = [""]
    for token in tokens:
        if token == "**":
            runs.append("")
        else:
            runs[-1] += _token_regex(token)
    return re.compile(_with_gaps(runs, r"(?:[^.]+\.)*"))


@lru_cache(maxsize=1024)
def class_regex(glob: str) -> re.Pattern[str]:
    """Matches a class name."""
    return re.compile(_with_gaps(glob.split("*"), r"\w*"))


def _token_regex(token: str) -> str:
    if token == "*":
        return r"[^.]+\."
    if token.startswith("["):
        numbers = [branch for low, high in ranges(token) for branch in _numbers_between(low, high)]
        return rf"(?:{'|'.join(numbers)})\."
    return _with_gaps(list(map(re.escape, token.split("*"))), "[^.]*") + r"\."


def _with_gaps(parts: list[str], gap: str) -> str:
    """The parts with any number of ``gap`` between. What stands between two gaps may settle for its first place, which
    keeps the time linear where a pattern has many of them."""
    if len(parts) == 1:
        return parts[0]
    first, *middle, last = parts
    return first + "".join(f"(?>{gap}?{part})" for part in middle) + gap + last


def ranges(token: str) -> list[tuple[int, int]]:
    """The bounds, both included, in ``[0-3,7]``."""
    bounds = (part.partition("-") for part in token[1:-1].split(","))
    return [(int(low), int(high or low)) for low, _, high in bounds]


def _numbers_between(low: int, high: int) -> Iterator[str]:
    """Regexes that together match exactly the decimal numbers from ``low`` to ``high``, one per number of digits."""
    for digits in range(len(str(low)), len(str(high)) + 1):
        smallest = 10 ** (digits - 1) if digits > 1 else 0
        yield _digits_between(str(max(low, smallest)), str(min(high, 10**digits - 1)))


def _digits_between(low: str, high: str) -> str:
    """``_numbers_between`` for bounds of equally many digits."""
    if not low:
        return ""
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return low[0] + _digits_between(low[1:], high[1:])
    branches = [low[0] + _digits_between(low[1:], "9" * rest), high[0] + _digits_between("0" * rest, high[1:])]
    if last - first > 1:
        branches.append(f"[{first + 1}-{last - 1}]" + "[0-9]" * rest)
    return f"(?:{'|'.join(branches)})"
