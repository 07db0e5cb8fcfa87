"""Which modules and parameters a plan line speaks of: ``.layers.*.{self_attn,mlp}@*Attention?``.

A pattern is ``[.]token(.token)*[@Class][?]``. ``*`` is one token, ``**`` any number, ``[0-3,7]`` a range of integer
tokens, ``*_proj`` a glob within a token, ``{a,b}`` expands into alternatives. Anchored at both ends, case-sensitive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from shardplan.globs import class_regex, path_regex, ranges

Specificity = tuple[tuple[int, ...], bool]

MAX_ALTERNATIVES = 1024
MAX_BRACES = 32

# What a token weighs when two patterns match one fqn. The end of a pattern lies between `**` and `*`, so that
# `a.b` beats `a.b.**` and `**.q` beats `**`.
_ANY_DEPTH, _END, _ANY_TOKEN, _GLOB, _RANGE, _LITERAL = range(6)

_LITERAL_TOKEN = re.compile(r"[\w-]+")
_GLOB_TOKEN = re.compile(r"[\w*-]+")
_RANGE_TOKEN = re.compile(r"\[[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*\]")
_CLASS_GLOB = re.compile(r"[\w*]+")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One brace-free reading of a pattern.

    Attributes:
        text: as a user would write it, for reports.
        relative: whether ``tokens`` start at the plan's root rather than at the model.
        tokens: the path, one entry per dotted part.
        classes: class name globs of which one must match; empty means any class.
    """

    text: str
    relative: bool
    tokens: tuple[str, ...]
    classes: tuple[str, ...] = ()

    def rooted(self, root: str) -> Alternative:
        """The same alternative as an absolute one, below ``root``; ``""`` is the model itself."""
        if not self.relative:
            return self
        prefix = tuple(root.split(".")) if root else ()
        text = root + self.text if self.tokens and root else (root + self.text.removeprefix(".") or ".")
        return replace(self, text=text, relative=False, tokens=prefix + self.tokens)

    def matches(self, fqn: str, class_name: str = "") -> bool:
        """Whether a module or parameter is meant. ``fqn`` starts where the tokens do; ``""`` is the start itself."""
        # Every token consumes its dot, so that `**` may also stand for nothing.
        if path_regex(self.tokens).fullmatch(f"{fqn}." if fqn else "") is None:
            return False
        return not self.classes or any(class_regex(glob).fullmatch(class_name) for glob in self.classes)

    def specificity(self, subtree: bool = False) -> Specificity:
        """Of two alternatives that match one fqn, the greater one wins.

        Args:
            subtree: compare as a rule that claims everything below what it matches: as if ``**`` were appended.
        """
        tokens = _without_repeated_depth((*self.tokens, "**") if subtree else self.tokens)
        return (*map(_weight, tokens), _END), bool(self.classes)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern. Every alternative must match something, unless ``optional``."""

    text: str
    alternatives: tuple[Alternative, ...]
    optional: bool = False

    def __str__(self) -> str:
        return self.text


def parse_pattern(text: str) -> Pattern:
    """Read a pattern as a plan file writes it.

    Raises:
        ValueError: it is no pattern; the message says why and what to write.
    """
    body = text.removesuffix("?")
    _refuse_foreign_characters(body)
    path, class_text = _split_class(body)
    classes = tuple(_expand(class_text)) if class_text else ()
    for glob in classes:
        if not _CLASS_GLOB.fullmatch(glob):
            raise ValueError(
                f"'{glob}' is not a class name: after '@' write one, with '*' as a glob and {{a,b}} for several"
            )
    suffix = f"@{class_text}" if class_text else ""
    readings = [(reading, *_tokens(reading)) for reading in _expand(path)]
    alternatives = tuple(
        Alternative(reading + suffix, relative, tokens, classes) for reading, relative, tokens in readings
    )
    return Pattern(text, alternatives, optional=body != text)


def _refuse_foreign_characters(body: str) -> None:
    if not body:
        raise ValueError("the pattern is empty: write a path such as .layers.*.mlp, or '.' for the root")
    if "?" in body:
        raise ValueError("'?' only stands at the end, where it lets the whole pattern match nothing")
    if body.count("{") > MAX_BRACES:
        raise ValueError(f"more than {MAX_BRACES} pairs of braces")
    foreign = next((c for c in body if not re.fullmatch(r"[\w.*@{},\[\]-]", c)), None)
    if foreign is not None:
        shown = "a space" if foreign == " " else repr(foreign)
        raise ValueError(
            f"{shown} cannot be part of a pattern: patterns are paths with *, **, {{a,b}}, [0-3] and @Class"
        )


def _split_class(body: str) -> tuple[str, str]:
    """``path@Class`` as its two parts; the second is empty without ``@``."""
    path, at, class_text = body.partition("@")
    if not at:
        return path, ""
    if path.count("{") != path.count("}"):
        raise ValueError("'@' cannot stand inside braces: write one rule for each class, or @{A,B} at the end")
    if not path:
        raise ValueError("'@Class' needs a path before it: '**@Class' is that class anywhere")
    if not class_text or "@" in class_text:
        raise ValueError("write exactly one class after one '@': .layers.*.mixer@*Attention")
    return path, class_text


def _expand(text: str) -> list[str]:
    """``a{b,c}`` as ``ab`` and ``ac``, without repetitions; braces may nest and hold dots."""
    opening = text.find("{")
    if opening < 0:
        if "}" in text:
            raise ValueError("'}' without '{' before it")
        return [text]
    closing, commas = _brace_group(text, opening)
    head, tails = text[:opening], _expand(text[closing + 1 :])
    if "}" in head:
        raise ValueError("'}' without '{' before it")
    borders = [opening, *commas, closing]
    choices = [choice for left, right in pairwise(borders) for choice in _expand(text[left + 1 : right])]
    if not any(choices):
        raise ValueError("'{}' has nothing to choose from")
    if len(choices) * len(tails) > MAX_ALTERNATIVES:
        raise ValueError(f"the braces expand to more than {MAX_ALTERNATIVES} alternatives")
    return list(dict.fromkeys(head + choice + tail for choice in choices for tail in tails))


def _brace_group(text: str, opening: int) -> tuple[int, list[int]]:
    """Where the brace at ``opening`` closes, and the commas that separate its choices."""
    commas: list[int] = []
    depth, in_range = 0, False
    for i in range(opening, len(text)):
        char = text[i]
        in_range = char == "[" or (in_range and char != "]")
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return i, commas
        if char == "," and depth == 1 and not in_range:
            commas.append(i)
    raise ValueError("'{' is never closed")


def _tokens(reading: str) -> tuple[bool, tuple[str, ...]]:
    """Whether a brace-free path is relative, and its tokens."""
    relative = reading.startswith(".")
    path = reading.removeprefix(".")
    if not path:
        if relative:
            return True, ()
        raise ValueError("an alternative of the braces is empty: the root is written '.'")
    tokens = tuple(path.split("."))
    for token in tokens:
        _check_token(token, reading)
    return relative, _without_repeated_depth(tokens)


def _check_token(token: str, reading: str) -> None:
    if not token:
        raise ValueError(f"'{reading}' has an empty name between two dots or at its end")
    if _RANGE_TOKEN.fullmatch(token):
        for low, high in ranges(token):
            if low > high:
                raise ValueError(f"the range {low}-{high} is empty: write the lower number first")
    elif "[" in token or "]" in token:
        raise ValueError(f"'{token}' is not a range: write [0-3] or [0-3,7], as a whole name between dots")
    elif "**" in token and token != "**":
        raise ValueError(f"'**' stands alone between dots: '{token}' would be '*' within one name")
    elif not _GLOB_TOKEN.fullmatch(token):
        raise ValueError(f"'{token}' is not a name: a comma only stands inside braces or a range")


def _without_repeated_depth(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """``**.**`` means what ``**`` does, and must weigh the same."""
    grouped = ((token, list(group)) for token, group in groupby(tokens))
    return tuple(t for token, group in grouped for t in (group[:1] if token == "**" else group))


def _weight(token: str) -> int:
    if token == "**":
        return _ANY_DEPTH
    if token == "*":
        return _ANY_TOKEN
    if token.startswith("["):
        return _RANGE
    return _LITERAL if _LITERAL_TOKEN.fullmatch(token) else _GLOB
