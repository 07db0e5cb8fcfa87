"""Finds the unquoted text behind a YAML error: ``*.q_proj: colwise`` starts an alias, not a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

_ALONE = "*@`%&!"  # characters that start something else wherever they start a token
_WITHIN = "{[?"  # characters that end unquoted text inside {...} and [...]
_STARTS = tuple(f"while scanning a{what}" for what in ("n alias", "n anchor", " tag", " directive", " simple"))
_OPENERS, _CLOSERS = "{[", "}]"


@dataclass(frozen=True, slots=True)
class Special:
    """A character that should have been quoted: its place, and the whole text that it starts or breaks."""

    char: str
    line: int
    column: int
    text: str

    @property
    def quoted(self) -> str:
        """The text as YAML that means it."""
        return quote(self.text)


def quote(text: str) -> str:
    """Double-quoted YAML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def in_error(error: yaml.MarkedYAMLError, text: str) -> Special | None:
    """The special character that made YAML give up, if one did."""
    starts_at_context = (error.context or "").startswith(_STARTS)
    mark = error.context_mark if starts_at_context else error.problem_mark
    if mark is None:
        return None
    start, char = mark.index, text[mark.index : mark.index + 1]
    before = text[start - 1 : start]
    if char and char in _ALONE:
        return _special(text, start, char)
    if char and char in _WITHIN and before and not before.isspace():
        start -= len(re.search(r"[^\s,{\[]*$", text[:start])[0])  # type: ignore[index]  # matches always
        return _special(text, start, char)
    if char == "?":
        return _special(text, start, char)
    if before and before in _CLOSERS:  # {a,b}.x: the braces ended before the text did
        opening = _opening(text, start - 1)
        return None if opening is None else _special(text, opening, text[opening])
    return None


def in_node(node: yaml.Node, text: str, is_key: bool = False) -> Special | None:
    """The special character that YAML took for syntax where a plan only has text."""
    start = node.start_mark.index
    char = text[start : start + 1]
    if isinstance(node, yaml.ScalarNode):
        empty_anchor = char == "&" and node.value == "" and node.style is None
        if empty_anchor or char == "!" or (char == "?" and node.style is None) or _has_foreign_tag(node):
            return _special(text, start, char)
        return None
    assert isinstance(node, yaml.CollectionNode)
    if is_key and not node.flow_style:  # `? a: b`, whose key starts after the question mark
        start, char = text.rfind("?", 0, start), "?"
    if is_key or _has_foreign_tag(node) or (node.flow_style and char == "?"):
        return _special(text, start, char)
    return None


def _has_foreign_tag(node: yaml.Node) -> bool:
    if isinstance(node, yaml.ScalarNode):
        return not str(node.tag).startswith("tag:yaml.org,2002:")
    return node.tag != f"tag:yaml.org,2002:{'map' if isinstance(node, yaml.MappingNode) else 'seq'}"


def _special(text: str, start: int, char: str) -> Special:
    line_start = text.rfind("\n", 0, start) + 1
    line = text.count("\n", 0, start) + 1
    return Special(char, line, start - line_start + 1, _meant(text, line_start, start))


def _meant(text: str, line_start: int, start: int) -> str:
    """The key or value that the author meant to write: up to ``: ``, a comment, or what closes the flow around it."""
    rest = text[start:].partition("\n")[0].rstrip("\r")
    before = text[line_start:start]
    in_flow = sum(map(before.count, _OPENERS)) > sum(map(before.count, _CLOSERS))
    depth = 0
    for i, char in enumerate(rest):
        following = rest[i + 1 : i + 2]
        ends_key = char == ":" and depth <= 0 and (not following or following.isspace())
        starts_comment = char == "#" and rest[i - 1 : i].isspace()
        ends_flow = in_flow and depth == 0 and char in ",}]"
        if ends_key or starts_comment or ends_flow:
            return rest[:i].rstrip()
        depth += (char in _OPENERS) - (char in _CLOSERS)
    return rest.rstrip()


def _opening(text: str, closing: int) -> int | None:
    """Where the bracket that closes at ``closing`` opens, if on the same line."""
    depth = 0
    for i in range(closing, -1, -1):
        if text[i] == "\n":
            return None
        depth += (text[i] in _CLOSERS) - (text[i] in _OPENERS)
        if depth == 0:
            return i
    return None
