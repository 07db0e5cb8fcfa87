"""Many names as few: ``model.layers.[0-31].mlp`` for one module in each of 32 layers. Nothing is lost by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from shardplan.globs import ranges

Numbers = tuple[int, ...]


def ranged(fqns: Iterable[str]) -> dict[str, int]:
    """Exactly these names, those that differ in numbers as one with ranges, each with how many it stands for."""
    families: dict[tuple[str | None, ...], list[Numbers]] = {}
    for fqn in fqns:
        tokens = fqn.split(".")
        family = tuple(None if _is_number(token) else token for token in tokens)
        families.setdefault(family, []).append(tuple(int(token) for token in tokens if _is_number(token)))
    return {
        _filled(family, tokens): count for family, numbers in families.items() for tokens, count in _grouped(numbers)
    }


def spelled_out(name: str) -> Iterator[str]:
    """The names that a name with ranges stands for; the inverse of `ranged`."""
    tokens = [_numbers(token) if token.startswith("[") else [token] for token in name.split(".")]
    return (".".join(choice) for choice in product(*tokens))


def _grouped(numbers: Sequence[Numbers]) -> list[tuple[tuple[str, ...], int]]:
    """Tuples of numbers as tuples of ranges: first numbers go together where the same tuples follow them."""
    if not numbers[0]:
        return [((), 1)]
    followers: dict[int, list[Numbers]] = {}
    for first, *rest in numbers:
        followers.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[Numbers, ...], list[int]] = {}
    for first, rests in sorted(followers.items()):
        alike.setdefault(tuple(sorted(rests)), []).append(first)
    return [
        ((_token(firsts), *tokens), len(firsts) * count)
        for rests, firsts in alike.items()
        for tokens, count in _grouped(rests)
    ]


def _token(numbers: Sequence[int]) -> str:
    """Rising numbers as a plan writes them: ``3``, ``[0-31]``, ``[0-3,7]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return parts[0] if len(numbers) == 1 else f"[{','.join(parts)}]"


def _numbers(token: str) -> list[str]:
    return [str(number) for low, high in ranges(token) for number in range(low, high + 1)]


def _is_number(token: str) -> bool:
    """Whether it can be written as a number and read back; ``01`` cannot."""
    return token.isdecimal() and str(int(token)) == token


def _filled(family: Sequence[str | None], tokens: Sequence[str]) -> str:
    numbers = iter(tokens)
    return ".".join(next(numbers) if token is None else token for token in family)
