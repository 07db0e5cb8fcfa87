"""The JSON Schema of the plan file, generated from ``document``: ``python -m shardplan.schema`` writes the file."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from shardplan.document import PlanFile
from shardplan.resources import plan_schema_path

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
