"""Names over all layers, and the names that were probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def general(fqn: str) -> str:
    """``model.layers.3.mlp`` as ``model.layers.*.mlp``: what a fault has in common over layers."""
    return ".".join("*" if token.isdigit() else token for token in fqn.split("."))


def last(fqn: str) -> str:
    """``q_proj`` of ``model.layers.3.self_attn.q_proj``."""
    return fqn.rpartition(".")[2]


def with_article(noun: str) -> str:
    """``a Linear``, ``an Embedding``."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known words that look most like ``name``, best first."""
    return difflib.get_close_matches(name, list(dict.fromkeys(known)), n=limit, cutoff=0.5)


def likeness(tokens: Sequence[str], name: str) -> float:
    """How much a pattern's tokens are like a general name, from 0 to 1, token by token where they are as many."""
    others = name.split(".")
    if len(tokens) != len(others):
        return 0.8 * _ratio(".".join(tokens), name)
    return sum(_token_likeness(token, other) for token, other in zip(tokens, others, strict=True)) / len(others)


def _token_likeness(token: str, other: str) -> float:
    if other == "*":
        return float(token == "*" or token.isdigit() or token.startswith("["))
    return _ratio(token, other)


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()
