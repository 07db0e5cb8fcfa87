"""Why one rule wins over another, in words: what the order of `Candidate.precedence` came down to."""

from __future__ import annotations

from itertools import zip_longest

from shardplan.resolved import Candidate


def why(winner: Candidate, other: Candidate) -> str:
    """What decided between two rules that spoke about one name, said of the one that lost."""
    if winner.rule.layer.rank > other.rule.layer.rank:
        return f"'{winner.rule.layer.name}' lies above '{other.rule.layer.name}'"
    if winner.precedence == other.precedence:
        agree = winner.rule.says() == other.rule.says()
        return "says the same" if agree else "contradicts the first, and neither is more specific"
    (weights, _), (other_weights, _) = winner.precedence[1], other.precedence[1]
    if weights == other_weights:
        return f"names no class, where the first names @{','.join(winner.alternative.classes)}"
    tokens, other_tokens = _tokens(winner), _tokens(other)
    at = next(i for i, (w, o) in enumerate(zip_longest(weights, other_weights)) if w != o)
    mine, its = (names[at] if at < len(names) else None for names in (tokens, other_tokens))
    if its == "**" and not other.direct:
        return "reaches down from above, where the first speaks of the name"
    return f"less specific: {_spoken(its)}, where the first has {_spoken(mine)}"


def _tokens(candidate: Candidate) -> tuple[str, ...]:
    """What is compared: a claim that reaches down counts as if its pattern ended in ``**``."""
    tokens = candidate.alternative.tokens
    return tokens if candidate.direct or tokens[-1:] == ("**",) else (*tokens, "**")


def _spoken(token: str | None) -> str:
    return "its end" if token is None else f"'{token}'"
