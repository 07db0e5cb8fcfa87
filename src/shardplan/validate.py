"""A YAML document against the plan file's fields: every departure as a diagnostic with its line."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardplan.diagnostics import Diagnostic
from shardplan.document import Fsdp, Options, PlanFile, Precision, References, RuleOptions, UnitOptions
from shardplan.source import KeyPath, Source

_TYPES = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}


def validate(source: Source) -> PlanFile | tuple[Diagnostic, ...]:
    """The typed plan file, or everything that is wrong with it: SP007, SP008, SP010.

    What the source already found is not repeated.
    """
    if not isinstance(source.data, dict):
        if () in source.flawed:
            return ()
        message = f"a plan file is a mapping of keys to values, not {_spoken(source.data)}"
        where = source.locate(())
        return (Diagnostic("SP008", message, where=where, expected="'format: 1' and further keys"),)
    try:
        return PlanFile.model_validate(source.data)
    except ValidationError as error:
        return tuple(_diagnostics(error, source))


def closest(name: str, known: list[str]) -> str:
    """``did you mean 'x'?``, or nothing when no known name is near."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else ""


def _diagnostics(error: ValidationError, source: Source) -> Iterator[Diagnostic]:
    for detail in error.errors(include_url=False):
        path = _path(detail)
        if path not in source.flawed:
            yield _diagnostic(detail, path, source)


def _path(detail: ErrorDetails) -> KeyPath:
    """pydantic's location without the tags of unions and the mark of a key."""
    return tuple(part for part in detail["loc"] if not (isinstance(part, str) and part in _NOT_KEYS))


_NOT_KEYS = frozenset({"<style>", "<null>", "<options>", "<path>", "<list>", "[key]"})


def _diagnostic(detail: ErrorDetails, path: KeyPath, source: Source) -> Diagnostic:
    kind, subject = detail["type"], ".".join(map(str, path))
    name = str(path[-1]) if path else "plan"
    if kind == "extra_forbidden":
        known = list(_options_at(path[:-1]).model_fields)
        hint = closest(name, known)
        message = f"unknown key '{name}'"
        return Diagnostic("SP007", message, source.locate(path), subject, "one of " + ", ".join(known), hint)
    where = source.values.get(path) or source.locate(path)
    if kind == "missing":
        hint = "start the file with 'format: 1'" if name == "format" else ""
        return Diagnostic("SP008", f"'{name}' is missing", source.locate(path[:-1]), subject, hint=hint)
    if kind == "conversion":
        expected = "replicate, partial, stream or shard(N), or two of them with '->' between"
        return Diagnostic("SP010", detail["msg"], where, subject, expected)
    message, expected = _wrong_value(detail, path)
    return Diagnostic("SP008", message, where, subject, expected, _value_hint(detail, path))


def _wrong_value(detail: ErrorDetails, path: KeyPath) -> tuple[str, str]:
    kind, value = detail["type"], detail["input"]
    name = _name(path)
    if kind in _TYPES:
        return f"{name} is {_spoken(value)}", _TYPES[kind]
    if kind == "literal_error":
        return f"{name} is {_spoken(value)}", str(detail["ctx"]["expected"])
    if kind == "format":
        return detail["msg"], "1"
    if kind == "reshard":
        return f"{name}: {detail['msg']}", "true, false, or a number of ranks from 2"
    if kind == "empty":
        keys = ", ".join(RuleOptions.model_fields)
        return f"{name} says nothing", f"a style name, null, or at least one of {keys}"
    if kind == "string_too_short":
        return f"{name} is empty", "text"
    if kind == "too_short":
        return f"{name} is an empty list", "at least one item, or leave the key out"
    return f"{name}: {detail['msg']}", ""


def _value_hint(detail: ErrorDetails, path: KeyPath) -> str:
    value, in_rule = detail["input"], path[:1] == ("rules",) and len(path) == 2
    if in_rule and isinstance(value, str) and "->" in value:
        return f"an edge goes into a mapping: {{input: {value}}} or {{output: {value}}}"
    if in_rule and isinstance(value, bool):
        return "null replicates on purpose"
    if detail["type"] == "literal_error" and isinstance(value, str):
        return closest(value, [word.strip("'") for word in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")])
    if value is None:
        return "leave the key out where the file has nothing to say"
    if detail["type"] == "string_type" and isinstance(value, int | float):
        return f'quote it: "{value}"' if not isinstance(value, bool) else "quote it"
    return ""


def _name(path: KeyPath) -> str:
    if not path:
        return "the plan"
    last = path[-1]
    return f"item {last + 1} of '{path[-2]}'" if isinstance(last, int) else f"'{last}'"


def _spoken(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 40 else f"'{value[:40]}...'"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else f"'{value}', a date"


def _options_at(path: KeyPath) -> type[Options]:
    """The options that a mapping at ``path`` may have."""
    match path:
        case ():
            return PlanFile
        case ("rules", _):
            return RuleOptions
        case ("fsdp",):
            return Fsdp
        case ("mixed_precision",):
            return Precision
        case ("reference",):
            return References
    assert path[0] == "fsdp", path
    return UnitOptions
