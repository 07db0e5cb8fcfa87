"""The plan file's fields, as pydantic models: the source of truth for what a file may say and for its JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic.json_schema import WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

from shardplan.layouts import CONVERSION_REGEX, parse_conversion
from shardplan.sections import LARGEST, NAME_REGEX, SIZE_REGEX, parse_section
from shardplan.styles import STYLE_NAMES

T = TypeVar("T")

# Python's `$` also matches before a final line break, JSON Schema's does not: `(?!\n)$` is the end in both.
_END = r"(?!\n)$"
STYLE_REGEX = rf"^[A-Za-z_][A-Za-z0-9_.]*{_END}"
ATTRIBUTE_REGEX = rf"^(config[.])?[A-Za-z_][A-Za-z0-9_]*{_END}"
CLASS_REGEX = rf"^[A-Za-z_][A-Za-z0-9_]*{_END}"
ROOT_REGEX = rf"^([A-Za-z0-9_-]+([.][A-Za-z0-9_-]+)*)?{_END}"
MESH_REGEX = rf"^ *[A-Za-z_][A-Za-z0-9_]*=[0-9]+( *, *[A-Za-z_][A-Za-z0-9_]*=[0-9]+)* *{_END}"


class _NeverNull:
    """Keeps a written ``null`` out of a field whose ``None`` means that the file says nothing."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "nullable"
        inner: CoreSchema = schema["schema"]
        return inner


Said = Annotated[T | None, _NeverNull()]


def _text(regex: str, what: str) -> Callable[[Any], str]:
    """A validator for text that ``regex`` finds, as a JSON Schema ``pattern`` does."""

    def validate(value: Any) -> str:
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "not text")
        if not re.search(regex, value):
            raise PydanticCustomError("text", "'{value}' is not {what}", {"value": value, "what": what})
        return value

    return validate


def _conversion(value: Any) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "not text")
    try:
        parse_conversion(value)
    except ValueError as error:
        raise PydanticCustomError("conversion", "{problem}", {"problem": str(error)}) from None
    if not re.search(CONVERSION_REGEX, value):
        raise PydanticCustomError("conversion", "{problem}", {"problem": "write a conversion on one line, with spaces"})
    return value


def _integer(value: Any) -> int:
    """JSON Schema's integer: ``1.0`` is one, ``true`` is not. pydantic's strict int has it the other way round."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise PydanticCustomError("int_type", "not a whole number")
    return int(value)


def _format(value: Any) -> int:
    if _integer(value) != 1:
        raise PydanticCustomError("format", "format {value} is not one that this version reads", {"value": value})
    return 1


def _reshard(value: Any) -> bool | int:
    if isinstance(value, bool):
        return value
    if (ranks := _integer(value)) < 2:
        raise PydanticCustomError("reshard", "{value} is not a number of ranks to reshard over", {"value": value})
    return ranks


def _section(value: Any) -> dict[str, str]:
    """One name and its size."""
    if not isinstance(value, dict) or len(value) != 1:
        raise PydanticCustomError("section", "not one name and its size")
    ((name, size),) = value.items()
    try:
        section = parse_section(name, size if isinstance(size, str) else _integer(size))
    except (ValueError, TypeError, PydanticCustomError) as error:
        raise PydanticCustomError("section", "{problem}", {"problem": str(error)}) from None
    return {section.name: section.size}


def _dim(value: Any) -> int:
    if (dim := _integer(value)) < 0:
        raise PydanticCustomError("dim", "{value} is not a dim: they count from 0", {"value": value})
    return dim


def _string(regex: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": regex})


StyleName = Annotated[
    str,
    BeforeValidator(_text(STYLE_REGEX, "a style name")),
    WithJsonSchema({"anyOf": [{"enum": list(STYLE_NAMES)}, {"type": "string", "pattern": STYLE_REGEX}]}),
]
ClassName = Annotated[str, BeforeValidator(_text(CLASS_REGEX, "a class name")), _string(CLASS_REGEX)]
RootPath = Annotated[str, BeforeValidator(_text(ROOT_REGEX, "a module path such as model")), _string(ROOT_REGEX)]
MeshText = Annotated[str, BeforeValidator(_text(MESH_REGEX, "a mesh such as dp=2,tp=4")), _string(MESH_REGEX)]
ConversionText = Annotated[str, BeforeValidator(_conversion), _string(CONVERSION_REGEX)]
Format = Annotated[int, BeforeValidator(_format), WithJsonSchema({"type": "integer", "const": 1})]
Reshard = Annotated[
    bool | int,
    BeforeValidator(_reshard),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 2}]}),
]
Dim = Annotated[int, BeforeValidator(_dim), WithJsonSchema({"type": "integer", "minimum": 0})]
SectionEntry = Annotated[
    dict[str, str],
    BeforeValidator(_section),
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "propertyNames": {"type": "string", "pattern": NAME_REGEX},
            "additionalProperties": {
                "anyOf": [
                    {"type": "string", "pattern": SIZE_REGEX},
                    {"type": "integer", "minimum": 0, "maximum": LARGEST},
                ]
            },
        }
    ),
]
AttributeName = Annotated[
    str, BeforeValidator(_text(ATTRIBUTE_REGEX, "an attribute such as num_heads")), _string(ATTRIBUTE_REGEX)
]
Text = Annotated[str, Field(min_length=1)]
PatternText = Text
Dtype = Literal["float32", "bfloat16", "float16"]


class Options(BaseModel):
    """Named options; unknown ones are errors, and nothing is converted from another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RuleOptions(Options):
    """A rule that says more than a style's name."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    style: Said[StyleName] = Field(default=None, description="how the module's parameters are split")
    input: Said[ConversionText] = Field(
        default=None, description="the layout that comes in -> the one the module computes on"
    )
    output: Said[ConversionText] = Field(
        default=None, description="the layout the module computes -> the one that goes out"
    )
    dim: Said[Dim] = Field(default=None, description="the dim that style shard cuts; 0 by default")
    sections: Said[Annotated[list[SectionEntry], Field(min_length=1)]] = Field(
        default=None,
        description="what a packed weight consists of, in order: a name and a size in config fields for each",
    )
    local_sizes: Said[Annotated[list[AttributeName], Field(min_length=1)]] = Field(
        default=None,
        description="attributes of the module, or config.<field>, that count what is cut: each rank reads its share",
    )


def _rule_kind(value: Any) -> str:
    return "<null>" if value is None else "<options>" if isinstance(value, dict) else "<style>"


def _not_empty(value: Any) -> Any:
    if value == {}:
        raise PydanticCustomError("empty", "says nothing")
    return value


# The tags name no key of a file, so that they can be told from keys in pydantic's error locations.
RuleValue = Annotated[
    Annotated[StyleName, Tag("<style>")]
    | Annotated[None, Tag("<null>")]
    | Annotated[RuleOptions, BeforeValidator(_not_empty), Tag("<options>")],
    Discriminator(_rule_kind),
]


class UnitOptions(Options):
    """How FSDP2 treats a unit."""

    reshard: Said[Reshard] = Field(
        default=None,
        description="free the parameters after the forward; a number keeps them sharded over that many ranks",
    )


class Fsdp(Options):
    """What FSDP2 wraps. The whole model is always the outermost unit."""

    units: dict[PatternText, UnitOptions] = Field(default={}, description="modules wrapped one by one, by pattern")
    root: UnitOptions = Field(default=UnitOptions(), description="the outermost unit")


class Precision(Options):
    """FSDP2's mixed precision, by torch dtype name."""

    param: Said[Dtype] = Field(default=None, description="dtype of parameters and compute")
    reduce: Said[Dtype] = Field(default=None, description="dtype of gradient sums")
    output: Said[Dtype] = Field(default=None, description="dtype that the forward returns")


class References(Options):
    """What --check uses when it is not told a model or a mesh."""

    models: list[Text] = Field(default=[], description="shipped reference models or paths to a config.json")
    meshes: list[MeshText] = Field(default=[], description="meshes such as dp=2,tp=4")


def _root_kind(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<path>"


class PlanFile(Options):
    """A shardplan plan file, format 1."""

    format: Format = Field(description="the version of this file format")
    architectures: Said[Annotated[list[ClassName], Field(min_length=1)]] = Field(
        default=None, description="model classes that the plan is for; any without this key"
    )
    root: Said[
        Annotated[
            Annotated[RootPath, Tag("<path>")] | Annotated[list[RootPath], Field(min_length=1), Tag("<list>")],
            Discriminator(_root_kind),
        ]
    ] = Field(default=None, description="what a leading dot stands for; of several, the first that exists in the model")
    rules: dict[PatternText, RuleValue] = Field(default={}, description="pattern to style; null replicates on purpose")
    fsdp: Fsdp = Field(default=Fsdp(), description="what FSDP2 wraps")
    recompute: Said[list[PatternText]] = Field(default=None, description="modules whose activations are recomputed")
    sequence_parallel: Said[bool] = Field(
        default=None, description="cut the residual stream along the sequence; off by default"
    )
    logits: Said[Literal["sharded", "gathered"]] = Field(
        default=None, description="what the model returns; sharded by default"
    )
    mixed_precision: Said[Precision] = Field(default=None, description="FSDP2's mixed precision")
    cpu_offload: Said[bool] = Field(default=None, description="keep sharded parameters in host memory")
    reference: References = Field(default=References(), description="what --check uses when not told")
    extends: Said[Text] = Field(
        default=None, description="the plan below: a shipped name, or a path relative to this file"
    )
    fallback: Said[Literal["hf", "none"]] = Field(
        default=None, description="whether transformers' own plan fills what is left; it does by default"
    )
