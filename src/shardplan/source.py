"""YAML text as plain data in which every key and value knows its line and column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardplan import unquoted
from shardplan.diagnostics import Diagnostic, Location, PlanError

KeyPath = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 50_000  # after aliases are expanded

_STR = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_CORE = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Source:
    """A YAML document.

    Attributes:
        file: as diagnostics name it.
        data: dicts with text keys, lists and scalars.
        keys, values: where each key and each value is written; the document itself is at ``()``.
        findings: what is wrong with the document as YAML; what they speak of is missing from ``data``.
        flawed: the paths that ``findings`` speak of.
    """

    file: str
    data: Any
    keys: Mapping[KeyPath, Location]
    values: Mapping[KeyPath, Location]
    findings: tuple[Diagnostic, ...]
    flawed: frozenset[KeyPath]

    def locate(self, path: KeyPath) -> Location:
        """Where ``path`` is written: its key, else its value, else the nearest thing around it."""
        while path and path not in self.keys and path not in self.values:
            path = path[:-1]
        return self.keys.get(path) or self.values.get(path) or Location(self.file)


def read_source(path: Path) -> Source:
    """Read a YAML file.

    Raises:
        PlanError: SP001, SP002, SP003 or SP012; nothing in the file can be relied on.
    """
    return parse_source(_read_text(path), shown(path))


def shown(path: Path) -> str:
    """A path as messages name it: from the working directory where it lies inside."""
    try:
        return str(path.relative_to(Path.cwd())) if path.is_absolute() else str(path)
    except ValueError:
        return str(path)


def parse_source(text: str, file: str) -> Source:
    """Read YAML text that came from ``file``.

    Raises:
        PlanError: SP002, SP003 or SP012; nothing in the text can be relied on.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PlanError([_syntax_error(error, text, file)]) from None
    except RecursionError:
        raise PlanError([_too_deep(Location(file))]) from None
    if root is None or (root.tag == _NULL and root.value == ""):
        message = "the file holds nothing but comments" if "#" in text else "the file is empty"
        raise PlanError([Diagnostic("SP012", message, where=Location(file), hint="a plan starts with 'format: 1'")])
    walk = _Walk(text, file)
    data = walk.value(root, ())
    return Source(file, data, walk.keys, walk.values, tuple(walk.findings), frozenset(walk.flawed))


def _read_text(path: Path) -> str:
    file = shown(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"'{file}' cannot be read: {reason[:1].lower()}{reason[1:]}"
        raise PlanError([Diagnostic("SP001", message, Location(file), file)]) from None
    if len(raw) > MAX_BYTES:
        raise _no_plan(file, f"'{file}' is larger than {MAX_BYTES >> 20} MiB, which no plan is")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _no_plan(file, f"'{file}' is not UTF-8 text (byte {error.start}, line {line})", line) from None


def _no_plan(file: str, message: str, line: int = 0) -> PlanError:
    return PlanError([Diagnostic("SP012", message, Location(file, line), file, "a YAML file, in UTF-8")])


def _syntax_error(error: yaml.YAMLError, text: str, file: str) -> Diagnostic:
    if isinstance(error, yaml.reader.ReaderError):  # a character that YAML forbids; it knows no line
        before = text[: error.position]
        where = Location(file, before.count("\n") + 1, error.position - before.rfind("\n"))
        return Diagnostic(
            "SP002", f"the character U+{ord(text[error.position]):04X} is not allowed in YAML", where=where
        )
    assert isinstance(error, yaml.MarkedYAMLError)
    special = unquoted.in_error(error, text)
    if special is not None:
        return _quote_it(special, file)
    mark, problem, hint = _explained(error)
    return Diagnostic("SP002", problem, where=_location(mark, file), hint=hint)


def _explained(error: yaml.MarkedYAMLError) -> tuple[yaml.Mark | None, str, str]:
    """Where the mistake is, what it is, and what to do; YAML's own words where they serve."""
    context, problem = error.context or "", error.problem or "cannot be read"
    if "scanning a simple key" in context:
        return error.context_mark, "a line that is neither 'key: value' nor a list item", "put ': ' after the key"
    if "scanning a quoted scalar" in context and "end of stream" in problem:
        return error.context_mark, "a quote that is never closed", "close it on the same line"
    if "'\\t'" in problem:
        return error.problem_mark, "a tab where YAML wants spaces", "indent with spaces"
    if "mapping values are not allowed here" in problem:
        hint = "quote a value that holds ': ', put each key on its own line, and check the line above for its ':'"
        return error.problem_mark, "': ' where no key can end", hint
    if "expected a single document" in context:
        return error.problem_mark, "a second document ('---') in one file", "write one plan per file"
    return error.problem_mark or error.context_mark, problem, ""


def _quote_it(special: unquoted.Special, file: str) -> Diagnostic:
    place = "at the start of" if special.text.startswith(special.char) else "within"
    return Diagnostic(
        "SP003",
        f"'{special.char}' {place} unquoted text means something else to YAML",
        where=Location(file, special.line, special.column),
        subject=special.text,
        hint=f"quote it: {special.quoted}",
    )


def _too_deep(where: Location) -> Diagnostic:
    return Diagnostic("SP002", f"nested more than {MAX_DEPTH} levels deep", where=where)


def _location(mark: yaml.Mark | None, file: str) -> Location:
    return Location(file, mark.line + 1, mark.column + 1) if mark else Location(file)


@dataclass(slots=True)
class _Walk:
    """Turns nodes into data, collecting findings; whatever would make the walk itself unsafe ends it."""

    text: str
    file: str
    keys: dict[KeyPath, Location] = field(default_factory=dict)
    values: dict[KeyPath, Location] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    flawed: set[KeyPath] = field(default_factory=set)
    nodes: int = 0
    constructor: yaml.constructor.SafeConstructor = field(default_factory=yaml.constructor.SafeConstructor)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        where = self.values[path] = _location(node.start_mark, self.file)
        self.nodes += 1
        if len(path) > MAX_DEPTH:  # an alias within its own anchor ends here, too
            raise PlanError([_too_deep(where)])
        if self.nodes > MAX_NODES:
            raise PlanError([Diagnostic("SP002", f"aliases expand to more than {MAX_NODES} values", where=where)])
        special = unquoted.in_node(node, self.text)
        if special is not None:
            return self._flaw(path, _quote_it(special, self.file))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path, where)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath, where: Location) -> Any:
        if node.tag == _NULL and node.value == "":
            what, hint = (f"'{path[-1]}' has no value", "write its value, or null to replicate on purpose")
            if path[:1] != ("rules",):
                hint = "write its value, or remove the key"
            if isinstance(path[-1], int):
                what, hint = "an empty list item", "write the item, or remove the dash"
            return self._flaw(path, Diagnostic("SP006", what, where=self.keys.get(path, where), hint=hint))
        try:
            return self.constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            return self._flaw(
                path, Diagnostic("SP002", "a value that YAML cannot convert", where=where, hint="quote it")
            )

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            where = _location(key_node.start_mark, self.file)
            key_path = (*path, key)
            if key_path in self.keys:
                first = self.keys[key_path]
                message = f"'{key}' is written twice, first at {first}"
                self.findings.append(
                    Diagnostic("SP004", message, where=where, subject=key, hint="keep one, or merge the two")
                )
                continue
            self.keys[key_path] = where
            value = self.value(value_node, key_path)
            if key_path not in self.flawed:
                data[key] = value
        return data

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        """The key as text, or None after a finding."""
        special = unquoted.in_node(node, self.text, is_key=True)
        where = _location(node.start_mark, self.file)
        if special is not None:
            self.findings.append(_quote_it(special, self.file))
        elif node.tag == _MERGE:
            hint = "write the keys out, or put what plans share in one that they extend"
            self.findings.append(Diagnostic("SP007", "merge keys ('<<') are not supported", where=where, hint=hint))
        elif node.tag != _STR:
            kind = node.tag.removeprefix(_CORE)
            written = self.text[node.start_mark.index : node.end_mark.index]
            message = f"the key '{written}' reads as {_KINDS.get(kind, kind)}, not as text"
            hint = f"quote it: {unquoted.quote(written)}"
            self.findings.append(Diagnostic("SP005", message, where=where, subject=written, hint=hint))
        else:
            return str(node.value)
        self.flawed.add(path)
        return None

    def _flaw(self, path: KeyPath, finding: Diagnostic) -> None:
        self.findings.append(finding)
        self.flawed.add(path)


_KINDS = {"int": "a number", "float": "a number", "bool": "a boolean", "timestamp": "a date"}
