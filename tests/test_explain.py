"""Explanations: the order of rules and what decided it, against what the compiler did; and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from golden import ROOT, TINY
from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.cli import command
from shardplan.explain import Explanation, explain, known_names
from shardplan.inventory import take_inventory
from shardplan.lower import lower
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.plan import Recompute
from shardplan.resolve import resolve
from tiny_models import build_meta, plan_of

PLAN = ROOT / "plans" / "llama.yaml"


def target(plan: Any = PLAN, mesh: str = "dp=2,tp=2", model: str = "llama", **sizes: Any) -> Target:
    resolved = resolve(read_plan(plan), take_inventory(build_meta(model, **sizes)))
    return Target(resolved, parse_mesh(mesh), False)


def explained(name: str, plan: Any = PLAN, **options: Any) -> tuple[Explanation, ...]:
    of = target(plan, **options)
    assert check(of) == ()
    return explain(of, lower(of.resolved, of.mesh, sequence_parallel=False), name)


def only(name: str, plan: Any = PLAN, **options: Any) -> Explanation:
    (explanation,) = explained(name, plan, **options)
    return explanation


def rules(folder: Path, *lines: str) -> Path:
    path = folder / "upper.yaml"
    path.write_text("format: 1\nrules:\n" + "".join(f"  {line}\n" for line in lines) + "fallback: none\n")
    return path


def test_a_module_of_a_block() -> None:
    found = only("model.layers.1.mlp.up_proj")
    assert (found.names, found.count, found.kind, found.module) == ("model.layers.1.mlp.up_proj", 1, "module", "Linear")
    (rule,) = found.rules
    assert (rule.pattern, rule.says, rule.wins, rule.why) == ("model.layers.*.mlp.up_proj", "colwise", True, "")
    assert (found.block, found.edges, found.unit) == ("model.layers.*.mlp", (), "model.layers.*")
    assert found.parameters is not None
    assert [(p.name, p.placement, p.tied_to) for p in found.parameters] == [("weight", "shard(0)", ())]


@pytest.mark.parametrize(
    ("model", "name", "placement"),
    [
        ("nemotron-h", "model.layers.0.mixer.in_proj.weight", "shard(0) in sections z, x, B, C, dt"),
        ("nemotron-h", "model.layers.0.mixer.out_proj.weight", "shard(1)"),
        ("gpt2", "transformer.h.*.attn.c_attn.weight", "shard(1) in sections q, k, v"),
    ],
)
def test_a_packed_parameter_shows_its_sections(model: str, name: str, placement: str) -> None:
    (found,) = explained(name, ROOT / "plans" / f"{plan_of(model)}.yaml", model=model)
    assert found.parameters is not None
    assert [parameter.placement for parameter in found.parameters] == [placement]


def test_a_block_shows_both_modes() -> None:
    edges = only("model.layers.0.self_attn").edges
    assert edges is not None
    said = [
        (edge.side, *((d.forward, d.backward) for d in (edge.tensor_parallel, edge.sequence_parallel) if d))
        for edge in edges
    ]
    assert said == [
        ("input", ("identity", "all_reduce"), ("all_gather", "reduce_scatter")),
        ("output", ("all_reduce", "identity"), ("reduce_scatter", "all_gather")),
    ]


def test_a_pattern_shows_one_of_those_that_fare_alike() -> None:
    assert [(e.names, e.count) for e in explained(".layers.*.mlp.{up,down}_proj.weight")] == [
        ("model.layers.[0-1].mlp.up_proj.weight", 2), ("model.layers.[0-1].mlp.down_proj.weight", 2),
    ]  # fmt: skip
    cut, plain = explained("model.layers.*@LlamaDecoderLayer")
    assert (cut.names, len(cut.edges or ()), plain.names, plain.edges) == ("model.layers.0", 1, "model.layers.1", ())


@pytest.mark.parametrize("line", [".layers.*.input_layernorm: sequence_parallel", "model.**: sequence_parallel"])
def test_a_higher_layer_wins(tmp_path: Path, line: str) -> None:
    of = target([PLAN, rules(tmp_path, line)])
    (found,) = explain(of, None, "model.layers.0.input_layernorm")
    first, second = found.rules
    assert first.where.endswith("upper.yaml:3:3")
    assert (first.wins, second.wins, second.why) == (True, False, "'upper' lies above 'llama'")


@pytest.mark.parametrize(
    ("winner", "loser", "why"),
    [
        (".layers.0.mlp: null", ".layers.*.mlp: replicate", "less specific: '*', where the first has '0'"),
        (".layers.[0-1].mlp: null", ".layers.*.mlp: replicate", "less specific: '*', where the first has '[0-1]'"),
        (".layers.*.mlp: null", ".layers.**: replicate", "less specific: '**', where the first has '*'"),
        (".layers.*.mlp: null", ".layers.*: replicate", "reaches down from above, where the first speaks of the name"),
        (".layers.*.mlp@*MLP: null", ".layers.*.mlp: replicate", "names no class, where the first names @*MLP"),
        (".layers.*.mlp: null", "model.layers.*.mlp: null", "says the same"),
        (".layers.*.mlp: null", "model.layers.*.mlp: replicate", "contradicts the first, and neither is more specific"),
    ],
)  # fmt: skip
def test_what_decides_between_rules_of_one_layer(tmp_path: Path, winner: str, loser: str, why: str) -> None:
    of = target(rules(tmp_path, f"{loser}", winner).rename(tmp_path / "own.yaml"))
    of = replace(of, resolved=resolve(replace(of.resolved.plan, roots=("model",)), of.resolved.inventory))
    (found,) = explain(of, None, "model.layers.0.mlp")
    assert [rule.wins for rule in found.rules] == [True, False]
    assert found.rules[1].why == why


def test_a_rule_of_edges_decides_nothing_about_parameters(tmp_path: Path) -> None:
    found = only("model.norm.weight", [PLAN, rules(tmp_path, ".norm: {input: stream, output: stream -> replicate}")])
    assert [(rule.wins, rule.why) for rule in found.rules] == [(True, ""), (False, "decides about edges only")]
    assert found.rules[0].layer == "[shipped]"
    assert found.edges is None
    assert found.module == "model.norm, LlamaRMSNorm"


def test_the_winner_is_who_the_compiler_follows() -> None:
    of = target([PLAN, {"model.layers.0.**": "sequence_parallel", "model.layers.0.mlp.up_proj.weight": None}])
    for name in known_names(of):
        for found in explain(of, None, name):
            winners = [rule.where for rule in found.rules if rule.wins]
            module = of.resolved.by_fqn.get(name)
            if module is not None:
                assert winners == [str(speaker.rule.where) for speaker in module.speakers[:1]]
            else:
                owner = of.resolved.by_fqn[name.rpartition(".")[0]]
                (claim,) = [p.claim for p in owner.parameters if p.info.fqn == name]
                assert winners == ([str(claim.where)] if claim else [])


def test_ties_units_and_recomputation() -> None:
    head = only("lm_head", tie_word_embeddings=True)
    assert head.parameters is not None
    assert [p.tied_to for p in head.parameters] == [("model.embed_tokens.weight",)]
    assert (head.unit, head.recomputed) == ("", None)
    assert only("lm_head", mesh="tp=2").unit is None
    of = target([PLAN])
    plan = replace(
        of.resolved.plan, recompute=tuple(Recompute(u.pattern, u.where, u.layer) for u in of.resolved.plan.units)
    )
    resolved = resolve(plan, of.resolved.inventory)
    (found,) = explain(of, lower(resolved, of.mesh, sequence_parallel=False), "model.layers.1.mlp")
    assert found.recomputed == "model.layers.*"


# ---------------------------------------------------------------- the command line


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(command, ["plans/llama.yaml", *TINY, *map(str, args)], catch_exceptions=False)


def test_the_text() -> None:
    result = run("--explain", "model.norm", "--explain", ".layers.*.mlp.up_proj")
    assert result.exit_code == 0
    assert (
        result.stdout
        == """\
model.norm (module, LlamaRMSNorm)
  rules, in order of precedence:
    -> model.norm: sequence_parallel, output: stream -> replicate  plans/llama.yaml:17:3 [shipped]
  output: stream -> replicate
    tensor parallel: nothing
    sequence parallel: all_gather in the forward, reduce_scatter_mean in the backward
  weight (32): replicate, gradient on each rank: partial while the stream is cut
    decided by model.norm (plans/llama.yaml:17:3)
  FSDP2 unit: the model

model.layers.[0-1].mlp.up_proj (2 modules, Linear)
  rules, in order of precedence:
    -> model.layers.*.mlp.up_proj: colwise  plans/llama.yaml:15:3 [shipped]
  block: model.layers.*.mlp, whose edges serve it
  weight (48 x 32): shard(0)
    decided by model.layers.*.mlp.up_proj (plans/llama.yaml:15:3)
  FSDP2 unit: model.layers.*

"""
    )


def test_the_data() -> None:
    data = json.loads(run("--explain", ".layers.*", "--format", "json").stdout)
    assert [(e["plan"], e["names"], e["count"]) for e in data["explanations"]] == [
        ("plans/llama.yaml", "model.layers.0", 1), ("plans/llama.yaml", "model.layers.1", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.0.mlp.up_prj", "the nearest names are model.layers.*.mlp.up_proj"),
        ("model.layers.7.mlp", "LlamaForCausalLM has no 'model.layers.7.mlp'"),
        ("zzz", "LlamaForCausalLM has no 'zzz'"),
        ("a..b", "'a..b' is no name and no pattern: "),
    ],
)
def test_an_unknown_name_is_a_usage_error(name: str, said: str) -> None:
    result = run("--explain", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_refused_plan_is_explained_as_far_as_it_goes(tmp_path: Path) -> None:
    result = run("--overlay", rules(tmp_path, ".layers.*.mlp.down_proj: null"), "--explain", ".layers.0.mlp.down_proj")
    assert result.exit_code == 1
    assert "-> model.layers.*.mlp.down_proj: null (replicated on purpose)" in result.stdout
    assert "nothing comes of it: the plan is refused" in result.stdout
    assert "SP203" in result.stdout


def test_a_plan_without_a_model_cannot_be_explained(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(rules(tmp_path, ".norm: null")), "--explain", "model.norm"])
    assert result.exit_code == 2
    assert "--explain needs a model and a mesh" in result.stderr
