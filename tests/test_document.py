"""The plan file's fields, their errors, and the JSON Schema made from them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shardplan.document import PlanFile
from shardplan.resources import plan_schema_path
from shardplan.schema import plan_schema, plan_schema_text
from shardplan.source import parse_source
from shardplan.styles import STYLE_NAMES
from shardplan.validate import validate

VALIDATOR = jsonschema.Draft202012Validator(plan_schema())


def findings(text: str) -> list[str]:
    checked = validate(parse_source(text, "f.yaml"))
    assert isinstance(checked, tuple)
    return [str(finding) for finding in checked]


def accepted_by_pydantic(data: Any) -> bool:
    try:
        PlanFile.model_validate(data)
    except ValidationError:
        return False
    return True


# ---- errors


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "format: 1\nrule: {}\n",
            "f.yaml:2:1: error SP007: unknown key 'rule'\n"
            "    expected: one of format, architectures, root, rules, fsdp, recompute, sequence_parallel, logits, "
            "mixed_precision, cpu_offload, reference, extends, fallback\n"
            "    hint: did you mean 'rules'?",
        ),
        (
            "format: 1\nrules:\n  .norm: {stile: block}\n",
            "f.yaml:3:11: error SP007: unknown key 'stile'\n"
            "    expected: one of style, input, output, dim, sections, local_sizes\n    hint: did you mean 'style'?",
        ),
        (
            "format: 1\nfsdp: {units: {.a: {reshrad: true}}}\n",
            "f.yaml:2:21: error SP007: unknown key 'reshrad'\n"
            "    expected: one of reshard\n    hint: did you mean 'reshard'?",
        ),
        (
            "format: 1\nmixed_precision: {zzz: 1}\n",
            "f.yaml:2:19: error SP007: unknown key 'zzz'\n    expected: one of param, reduce, output",
        ),
        ("rules: {}\n", "f.yaml:1:1: error SP008: 'format' is missing\n    hint: start the file with 'format: 1'"),
        (
            "format: 2\n",
            "f.yaml:1:9: error SP008: format 2 is not one that this version reads\n    expected: 1",
        ),
        ("format: true\n", "f.yaml:1:9: error SP008: 'format' is true\n    expected: a whole number"),
        (
            "format: 1\nsequence_parallel: maybe\n",
            "f.yaml:2:20: error SP008: 'sequence_parallel' is 'maybe'\n    expected: true or false",
        ),
        (
            "format: 1\nlogits: shard\n",
            "f.yaml:2:9: error SP008: 'logits' is 'shard'\n"
            "    expected: 'sharded' or 'gathered'\n    hint: did you mean 'sharded'?",
        ),
        (
            "format: 1\nlogits: null\n",
            "f.yaml:2:9: error SP008: 'logits' is null\n"
            "    expected: 'sharded' or 'gathered'\n    hint: leave the key out where the file has nothing to say",
        ),
        (
            "format: 1\nmixed_precision: {param: bf16}\n",
            "f.yaml:2:26: error SP008: 'param' is 'bf16'\n"
            "    expected: 'float32', 'bfloat16' or 'float16'\n    hint: did you mean 'bfloat16'?",
        ),
        (
            "format: 1\narchitectures: Llama\n",
            "f.yaml:2:16: error SP008: 'architectures' is 'Llama'\n    expected: a list",
        ),
        (
            "format: 1\narchitectures: [Llama, 3]\n",
            "f.yaml:2:24: error SP008: item 2 of 'architectures' is the number 3\n"
            '    expected: text\n    hint: quote it: "3"',
        ),
        (
            "format: 1\nroot: []\n",
            "f.yaml:2:7: error SP008: 'root' is an empty list\n    expected: at least one item, or leave the key out",
        ),
        (
            "format: 1\nroot: [model, .x]\n",
            "f.yaml:2:15: error SP008: item 2 of 'root': '.x' is not a module path such as model",
        ),
        (
            "format: 1\nrules: [a]\n",
            "f.yaml:2:8: error SP008: 'rules' is a list\n    expected: a mapping of keys to values",
        ),
        (
            "format: 1\nrules:\n  .a: true\n",
            "f.yaml:3:7: error SP008: '.a' is true\n    expected: text\n    hint: null replicates on purpose",
        ),
        (
            "format: 1\nrules:\n  .a: col wise\n",
            "f.yaml:3:7: error SP008: '.a': 'col wise' is not a style name",
        ),
        (
            "format: 1\nrules:\n  .a: partial -> stream\n",
            "f.yaml:3:7: error SP008: '.a': 'partial -> stream' is not a style name\n"
            "    hint: an edge goes into a mapping: {input: partial -> stream} or {output: partial -> stream}",
        ),
        (
            "format: 1\nrules:\n  .a: {}\n",
            "f.yaml:3:7: error SP008: '.a' says nothing\n"
            "    expected: a style name, null, or at least one of style, input, output, dim, sections, local_sizes",
        ),
        (
            "format: 1\nrules:\n  .a: {output: stream -> full}\n",
            "f.yaml:3:16: error SP010: 'full' is not a layout: write replicate, partial, stream or shard(N)\n"
            "    expected: replicate, partial, stream or shard(N), or two of them with '->' between",
        ),
        (
            "format: 1\nfsdp: {root: {reshard: 1}}\n",
            "f.yaml:2:24: error SP008: 'reshard': 1 is not a number of ranks to reshard over\n"
            "    expected: true, false, or a number of ranks from 2",
        ),
        (
            "format: 1\nreference: {meshes: [dp]}\n",
            "f.yaml:2:22: error SP008: item 1 of 'meshes': 'dp' is not a mesh such as dp=2,tp=4",
        ),
        (
            "- format: 1\n",
            "f.yaml:1:1: error SP008: a plan file is a mapping of keys to values, not a list\n"
            "    expected: 'format: 1' and further keys",
        ),
        (
            "llama\n",
            "f.yaml:1:1: error SP008: a plan file is a mapping of keys to values, not 'llama'\n"
            "    expected: 'format: 1' and further keys",
        ),
    ],
)
def test_one_mistake_is_one_exact_message(text: str, expected: str) -> None:
    assert findings(text) == [expected]


def test_every_mistake_is_reported() -> None:
    text = "format: 3\nlogit: sharded\nrules: {.a: 1, .b: {style: 2, input: x}}\nfsdp: {units: []}\n"
    assert [finding.split(" error ")[0] for finding in findings(text)] == [
        "f.yaml:1:9:", "f.yaml:3:13:", "f.yaml:3:28:", "f.yaml:3:38:", "f.yaml:4:15:", "f.yaml:2:1:",
    ]  # fmt: skip


def test_what_the_source_already_found_is_not_repeated() -> None:
    assert findings("format: 1\nlogits:\nx: y\n") == findings("format: 1\n\nx: y\n")
    assert isinstance(validate(parse_source("format: 1\nlogits:\n", "f.yaml")), PlanFile)
    assert findings("format:\n") == []


def test_a_registered_style_is_not_refused_by_its_name() -> None:
    data = {"format": 1, "rules": {".a": "my_style", ".b": {"style": "pkg.Style"}}}
    assert accepted_by_pydantic(data)
    assert VALIDATOR.is_valid(data)


# ---- the schema


def test_the_shipped_schema_is_the_generated_one() -> None:
    assert plan_schema_path().read_text() == plan_schema_text(), "run: python -m shardplan.schema"


def test_the_schema_is_one_for_its_draft_and_for_draft_7() -> None:
    jsonschema.Draft202012Validator.check_schema(plan_schema())
    jsonschema.Draft7Validator.check_schema(plan_schema())


DRAFT_7 = {
    *("$schema", "$ref", "title", "description", "definitions", "type", "enum", "const", "minimum", "minLength"),
    *("pattern", "items", "minItems", "properties", "required", "additionalProperties", "propertyNames"),
    *("minProperties", "maxProperties", "maximum", "anyOf"),
}  # fmt: skip


def keyword_objects(schema: Any) -> list[dict[str, Any]]:
    """Every schema within a schema, itself included."""
    if not isinstance(schema, dict):
        return []
    named = [part for word in ("properties", "definitions") for part in schema.get(word, {}).values()]
    single = [schema[word] for word in ("items", "additionalProperties", "propertyNames") if word in schema]
    return [schema, *(found for part in [*named, *single, *schema.get("anyOf", [])] for found in keyword_objects(part))]


def test_the_schema_keeps_to_keywords_that_draft_7_has() -> None:
    objects = keyword_objects(plan_schema())
    assert len(objects) > 30
    assert {word for part in objects for word in part} <= DRAFT_7


def test_every_object_of_the_schema_is_closed() -> None:
    mappings = [part for part in keyword_objects(plan_schema()) if part.get("type") == "object"]
    assert len(mappings) == 9
    for part in mappings:
        closed = part["additionalProperties"] is False
        assert closed == ("properties" in part)
        assert closed or part["propertyNames"].keys() in ({"type", "minLength"}, {"type", "pattern"})


def test_the_schema_completes_style_names() -> None:
    style = plan_schema()["definitions"]["RuleOptions"]["properties"]["style"]
    assert style["anyOf"][0] == {"enum": list(STYLE_NAMES)}


# ---- the schema against the models


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("format: 1", True),
        ("format: 1.0", True),
        ("format: true", False),
        ("format: '1'", False),
        ("format: .inf", False),
        ("format: .nan", False),
        ("format: 1\nrules: {0: block}", False),
        ("format: 1\nrules: {on: block}", False),
        ("format: 1\nrules: {null: block}", False),
        ("format: 1\n2: 3", False),
        ("format: 1\nrules: {'': block}", False),
        ("format: 1\nrules: null", False),
        ("format: 1\nrules: {.a: null, .b: {style: null}}", False),
        ("format: 1\nrules: {.a: null}", True),
        ("format: 1\nrules: {.a: {style: null}}", False),
        ('format: 1\nrules: {.a: "block\\n"}', False),
        ('format: 1\nrules: {.a: {input: "stream\\n"}}', True),
        ('format: 1\nrules: {.a: {input: "\\tstream"}}', False),
        ("format: 1\nrules: {.a: 2024-01-01}", False),
        ("format: 1\nfsdp: {root: {reshard: 4}}", True),
        ("format: 1\nfsdp: {root: {reshard: 4.0}}", True),
        ("format: 1\nfsdp: {root: {reshard: 4.5}}", False),
        ("format: 1\nfsdp: {root: {reshard: 0}}", False),
        ("format: 1\nroot: ''", True),
        ("format: 1\nroot: [model, '']", True),
        ("format: 1\nroot: {a: b}", False),
        ("format: 1\nrecompute: []", True),
        ("[]", False),
        ("1", False),
    ],
)
def test_pydantic_and_jsonschema_agree_where_they_are_known_to_differ(text: str, valid: bool) -> None:
    data = yaml.safe_load(text)
    assert (accepted_by_pydantic(data), VALIDATOR.is_valid(data)) == (valid, valid)


FULL = yaml.safe_load("""
format: 1
architectures: [LlamaForCausalLM]
root: [model, ""]
rules:
  .a: colwise
  .b: null
  .c: {style: sequence_parallel, output: stream -> replicate}
  .d: {input: shard(-1)}
  .e: {style: colwise, sections: [q: heads * dim, k: 2 * dim + 1, v: 4], local_sizes: [n, config.n], dim: 1}
fsdp: {units: {.a: {reshard: 4}, .b: {}}, root: {reshard: false}}
recompute: [.a]
sequence_parallel: true
logits: gathered
mixed_precision: {param: bfloat16, reduce: float32, output: float32}
cpu_offload: false
reference: {models: [m], meshes: ["dp=2,tp=4"]}
extends: llama
fallback: none
""")

ODD_VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, 1, 2, 1.0, 4.0, 0.5, -1, "", "\n", "a", "block", "model", "stream", [], {}]),
    st.sampled_from(
        ["shard( 2 )", "stream->partial", "bfloat16", "sharded", "hf", "tp=2", "a.b", "a b", "x\n", "stream\n"]
    ),
    st.sampled_from(
        [["a"], ["tp=2"], [1], [None], {"style": "block"}, {"reshard": True}, {"a": "b"}, {"x": {}}, {1: "a"}]
    ),
    st.sampled_from([{"q": "2 *"}, {"q": 3}, {"q": "a + b", "k": 1}, [{"q": "n * 2"}], [{"q": 1.0}, {"q": True}]]),
)
ODD_KEYS = st.sampled_from(["", "x", ".y", "style", "reshard", "output", 0, 0.5, True, None, "x\n"])


@st.composite
def documents(draw: st.DrawFn) -> Any:
    """The full plan with some keys dropped and up to two places changed; about half of them are still plans."""
    data = deepcopy(FULL)
    for key in draw(st.lists(st.sampled_from(sorted(set(data) - {"format"})), unique=True, max_size=8)):
        del data[key]
    for _ in range(draw(st.integers(0, 2))):
        places = list(containers(data))
        place = draw(st.sampled_from(places))
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        change = draw(st.sampled_from(["replace", "replace", "delete", "add", "append"]))
        if change == "append" and isinstance(place, list):
            place.append(deepcopy(draw(ODD_VALUES)))
        elif change == "add" and isinstance(place, dict):
            place[draw(ODD_KEYS)] = deepcopy(draw(ODD_VALUES))
        elif change == "delete" and keys:
            del place[draw(st.sampled_from(keys))]
        elif keys:
            place[draw(st.sampled_from(keys))] = deepcopy(draw(ODD_VALUES))
    return data


def containers(data: Any) -> list[Any]:
    """All dicts and lists in a document, itself included."""
    if not isinstance(data, dict | list):
        return []
    return [data, *(c for part in (data.values() if isinstance(data, dict) else data) for c in containers(part))]


def test_pydantic_and_jsonschema_agree_on_near_valid_documents() -> None:
    verdicts: list[bool] = []

    @settings(max_examples=400, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(documents())
    def agree(data: Any) -> None:
        verdicts.append(accepted_by_pydantic(data))
        assert verdicts[-1] == VALIDATOR.is_valid(data)

    agree()
    assert 0.3 <= sum(verdicts) / len(verdicts) <= 0.7, "the generator must give each verdict often"
