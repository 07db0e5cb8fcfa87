"""Whatever a plan, a configuration or a mesh says: an answer, never a traceback; and a bad plan is exit code 1."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broken_models import TINY
from mutants import LAYOUTS, STYLE_WORDS
from shardplan import PlanError
from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.cli import command
from shardplan.diagnostics import CODES, errors
from shardplan.inventory import Inventory, take_inventory
from shardplan.lower import lower
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.resolve import resolve
from tiny_models import build_meta

TOKENS = (
    "model", "layers", "*", "**", "0", "[0-1]", "self_attn", "mlp", "q_proj", "{q,k,v}_proj", "{gate,up}_proj",
    "o_proj", "down_proj", "norm", "input_layernorm", "embed_tokens", "lm_head", "weight", "*_proj", "rotary_emb",
    "nothing", "{", "a b",
)  # fmt: skip
patterns = st.builds(
    lambda dot, tokens, at, optional: ("." if dot else "") + ".".join(tokens) + at + ("?" if optional else ""),
    st.booleans(),
    st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4),
    st.sampled_from(("", "", "", "@*MLP", "@Llama{MLP,Attention}", "@")),
    st.booleans(),
)
styles = st.sampled_from((*STYLE_WORDS, "colwyse"))
edges = st.sampled_from((*LAYOUTS, "shard(9)", "shard(-3) -> replicate", "nonsense"))
anything = st.none() | st.booleans() | st.integers(-2, 5) | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
lengths = st.sampled_from(
    (1, 0, -1, 16, "hidden_size", "num_attention_heads * head_dim", "intermediate_size", "3 * hidden_size", "nobody",
     "hidden_size *", "hidden_size + 1", "10 ** 9", "")
)  # fmt: skip
names = st.sampled_from(("q", "k", "v", "gate", "up", "q", "weight", "", "a b"))
sections = st.lists(st.dictionaries(names, lengths, min_size=1, max_size=2), max_size=4) | anything
local_sizes = st.lists(st.sampled_from(("num_heads", "hidden_size", "nothing", "")), max_size=2) | anything
values = styles | st.fixed_dictionaries(
    {},
    optional={
        "style": styles,
        "input": edges,
        "output": edges,
        "sections": sections,
        "local_sizes": local_sizes,
        "dim": st.integers(-2, 3) | anything,
    },
)
units = st.dictionaries(patterns, st.fixed_dictionaries({}, optional={"reshard": anything}), max_size=3)
documents = st.fixed_dictionaries(
    {"format": st.just(1)},
    optional={
        "root": st.sampled_from(("model", "", "nowhere", ["model.layers", "model"])),
        "extends": st.sampled_from(("llama", "hf", "nowhere")),
        "fallback": st.sampled_from(("hf", "none", "llama")),
        "rules": st.dictionaries(patterns, values, max_size=6) | anything,
        "fsdp": st.fixed_dictionaries(
            {},
            optional={
                "units": units,
                "root": st.fixed_dictionaries({}, optional={"reshard": anything}),
            },
        ),
        "recompute": st.lists(patterns, max_size=2),
        "logits": st.sampled_from(("sharded", "gathered", "both")),
        "mixed_precision": st.fixed_dictionaries({}, optional={"param": st.sampled_from(("bfloat16", "int8"))}),
        "sequence_parallel": anything,
    },
)
meshes = st.sampled_from(
    ("tp=2", "dp=2,tp=2", "tp=3", "tp=64", "dp=1", "dp=2,cp=2,tp=2", "dp_replicate=2,dp=1,tp=4", "tp=1", "dp=1024,tp=8")
)
sizes = st.fixed_dictionaries(
    {},
    optional={
        "num_attention_heads": st.integers(0, 9),
        "num_key_value_heads": st.integers(0, 5),
        "hidden_size": st.sampled_from((32, 33, 0, -1)),
        "intermediate_size": st.sampled_from((48, 49, 1, 0)),
        "vocab_size": st.sampled_from((32, 33, 1, 5)),
        "num_hidden_layers": st.integers(0, 3),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "head_dim": st.sampled_from((8, 3, 1)),
    },
)
many = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def checked(plan: Any, config: dict[str, Any], mesh: str, *args: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder) / "plan.yaml", Path(folder) / "config.json"
        path.write_text(yaml.safe_dump(plan, sort_keys=False))
        model.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY, **config}))
        call = (str(path), "--model", str(model), "--mesh", mesh, *args)
        return CliRunner().invoke(command, call, catch_exceptions=False)


@many
@given(documents, meshes, st.sampled_from(("--check", "--sequence-parallel")))
def test_no_plan_is_beyond_an_answer(plan: Any, mesh: str, mode: str) -> None:
    result = checked(plan, {}, mesh, mode)
    assert result.exit_code in (0, 1), result.output
    assert result.exit_code == 0 or "error SP" in result.stdout


BUILT = {"llama": "llama", "qwen2": "qwen3", "gemma3": "gemma3-vision", "phi3": "phi3", "gpt2": "gpt2",
         "nemotron_h": "nemotron-h"}  # fmt: skip
RULES = [(plan, rule.pattern.text) for plan in BUILT for rule in read_plan(plan).rules]


@cache
def inventory_of(model: str) -> Inventory:
    return take_inventory(build_meta(model))


@many
@given(st.sampled_from(RULES), values | st.none(), meshes, st.booleans())
def test_no_rule_on_top_of_a_shipped_plan_is_beyond_an_answer(
    rule: tuple[str, str], value: Any, mesh: str, sequence_parallel: bool
) -> None:
    plan, pattern = rule
    target, found = None, ()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(yaml.safe_dump({"format": 1, "extends": plan, "rules": {pattern: value}}))
        try:
            target = Target(resolve(read_plan(path), inventory_of(BUILT[plan])), parse_mesh(mesh), sequence_parallel)
            found = check(target)
        except PlanError as refused:
            found = refused.diagnostics
    assert all(finding.code in CODES for finding in found)
    if target is not None and not errors(found):
        lower(target.resolved, target.mesh, sequence_parallel=sequence_parallel)


@many
@given(sizes, meshes)
def test_no_configuration_is_beyond_an_answer(config: dict[str, Any], mesh: str) -> None:
    result = checked({"format": 1, "extends": "llama"}, config, mesh, "--check")
    codes = {line.partition("error ")[2][:5] for line in result.stdout.splitlines() if "error SP" in line}
    assert result.exit_code in (0, 1) or codes == {"SP901"}, result.output


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.text(alphabet="dptc_=,0123456789 -x", max_size=16))
def test_no_mesh_is_beyond_an_answer(mesh: str) -> None:
    result = checked({"format": 1, "extends": "llama"}, {}, mesh, "--check")
    assert result.exit_code in (0, 1, 2)
    assert result.exit_code == 0 or "error SP" in result.stdout


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=60))
def test_no_file_is_beyond_an_answer(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_bytes(content)
        result = CliRunner().invoke(command, ["--check", str(path)], catch_exceptions=False)
    assert result.exit_code == 1, result.output
