"""The JSON Schemas of the plan file and of the report, generated from ``document`` and ``output``.

``python -m shardplan.schema`` writes both files.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from shardplan.document import PlanFile
from shardplan.resources import plan_schema_path, report_schema_path

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _PortableSchema(GenerateJsonSchema):
    """Draft 2020-12 in the words that draft 7 has too, which is what editors know."""

    schema_dialect = _DIALECT


def plan_schema() -> dict[str, Any]:
    """The schema of a plan file, as plain data."""
    schema = PlanFile.model_json_schema(ref_template="#/definitions/{model}", schema_generator=_PortableSchema)
    schema = _portable(schema)
    return {"$schema": _DIALECT, "title": "shardplan plan file", **schema}


def plan_schema_text() -> str:
    """The schema as the shipped file holds it."""
    return json.dumps(plan_schema(), indent=2) + "\n"


def report_schema() -> dict[str, Any]:
    """The schema of what ``--format json`` prints, as plain data."""
    from shardplan.output import Output

    schema = TypeAdapter(Output).json_schema(mode="serialization")
    return {"$schema": _DIALECT, "title": "plan-compile report", **_closed(schema)}


def report_schema_text() -> str:
    """The schema as the shipped file holds it."""
    return json.dumps(report_schema(), indent=2) + "\n"


def _closed(schema: Any) -> Any:
    """The schema without pydantic's titles, and with no keys but those that an object has."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {word: _closed(part) for word, part in schema.items() if word != "title" or not isinstance(part, str)}
    return {**closed, "additionalProperties": False} if "properties" in closed else closed


def _portable(schema: Any, names: bool = False) -> Any:
    """The schema without pydantic's titles and defaults, which tell an editor nothing, and with draft 7's keywords.

    Args:
        schema: any part of it.
        names: whether the keys of ``schema`` are names of the file rather than keywords.
    """
    if isinstance(schema, list):
        return [_portable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {name: _portable(part) for name, part in schema.items()}
    renamed = {"$defs": "definitions", "oneOf": "anyOf"}
    if "propertyNames" in schema:  # pydantic leaves the type out, as if YAML had no other keys than text
        schema = {**schema, "propertyNames": {"type": "string", **schema["propertyNames"]}}
    return {
        renamed.get(word, word): _portable(part, names=word in ("properties", "$defs"))
        for word, part in schema.items()
        if word not in ("title", "default")
    }


if __name__ == "__main__":
    plan_schema_path().write_text(plan_schema_text(), encoding="utf-8")
    report_schema_path().write_text(report_schema_text(), encoding="utf-8")
