"""Plans that others ship, and models whose names mislead: what is taken as it stands, and what is said of the rest.

NeMo-RL's documented plan, its stable one and its sequence parallel one are in tests/test_options.py, transformers' own
in tests/sweep.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import foreign_models
from pool import Pool
from shardplan import check_plan
from shardplan.diagnostics import Diagnostic, Severity, errors
from shardplan.hf.plan import hf_plan
from shardplan.inventory import take_inventory
from shardplan.merge import read_plan
from shardplan.resolve import resolve
from tiny_models import SIZES

MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "decoder_sparse_step": 1}


def build(model: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        built: nn.Module = model(config)
    return built


def plan_of(folder: Path, *rules: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(
        "format: 1\nroot: [model]\nrules:\n" + "".join(f"  {rule}\n" for rule in rules) + "fallback: none\n"
    )
    return path


def findings(plan: Any, model: nn.Module) -> list[Diagnostic]:
    return list(check_plan(plan, model, "tp=2", sequence_parallel=False))


ENDS = (
    ".embed_tokens: embedding_rowwise",
    ".rotary_emb: rotary",
    ".layers.0: {input: replicate -> stream}",
    "lm_head: {style: colwise, output: shard(-1)}",
)

# ---------------------------------------------------------------- C01: digits in names

LFM2 = (
    *ENDS,
    ".layers.*.{operator,ffn}_norm: sequence_parallel",
    ".embedding_norm: {style: sequence_parallel, output: stream -> replicate}",
    ".layers.*.{self_attn,feed_forward}: block",
    ".layers.*.self_attn.{q,k,v}_proj: colwise",
    ".layers.*.self_attn.{q,k}_layernorm: replicated_with_grad_allreduce",
    ".layers.*.self_attn.out_proj: rowwise",
    ".layers.*.feed_forward.w1: colwise",
    ".layers.*.feed_forward.w2: rowwise",
    ".layers.*.feed_forward.w3: colwise",
)


@pytest.fixture(scope="module")
def lfm2() -> nn.Module:
    return build(Lfm2ForCausalLM, Lfm2Config(**SIZES))


def test_c01_w1_is_a_name_and_no_number(lfm2: nn.Module, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *LFM2)
    assert findings(plan, lfm2) == []
    resolved = resolve(read_plan(plan), take_inventory(lfm2))
    matched = {str(entry.line.pattern): entry.fqns for entry in resolved.rules}
    for name in ("w1", "w2", "w3"):
        expected = tuple(f"model.layers.{layer}.feed_forward.{name}" for layer in range(2))
        assert matched[f".layers.*.feed_forward.{name}"] == expected


def test_c01_a_rule_that_matches_nothing_names_the_nearest(lfm2: nn.Module, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *[rule.replace("w3:", "w4:") for rule in LFM2])
    (dead,) = findings(plan, lfm2)
    assert (dead.code, dead.severity) == ("SP102", Severity.ERROR)
    assert dead.message == "model.layers.*.feed_forward.w4 matches nothing in Lfm2ForCausalLM"
    assert dead.hint == "did you mean model.layers.*.feed_forward.w3? No other rule speaks of it"


# ---------------------------------------------------------------- C04: a plan for another model's names

FALCON_H1 = (
    *ENDS,
    ".layers.*.{input,pre_ff}_layernorm: sequence_parallel",
    ".final_layernorm: {style: sequence_parallel, output: stream -> replicate}",
    ".layers.*.mamba: null",
    ".layers.*.self_attn: block",
    ".layers.*.self_attn.{q,k,v}_proj: colwise",
)
ITS_MLP = (
    ".layers.*.mlp: block",
    ".layers.*.mlp.{gate,up}_proj: colwise",
    ".layers.*.mlp.down_proj: rowwise",
)


@pytest.fixture(scope="module")
def falcon_h1() -> nn.Module:
    return build(FalconH1ForCausalLM, FalconH1Config(**SIZES, head_dim=8, **MAMBA))


def test_c04_the_model_says_feed_forward_and_a_style_is_unknown(falcon_h1: nn.Module, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *FALCON_H1, ".layers.*.self_attn.o_proj: rowwize", *ITS_MLP)
    unknown, *dead = findings(plan, falcon_h1)
    assert (unknown.code, str(unknown.where)) == ("SP101", f"{plan}:13:3")
    assert unknown.message == "unknown style 'rowwize' for .layers.*.self_attn.o_proj"
    assert "rowwise, rowwise_split_input" in unknown.expected
    assert unknown.hint.startswith("did you mean rowwise or ")
    assert {finding.code for finding in dead} == {"SP102"}
    assert [finding.hint for finding in dead] == [
        f"did you mean model.layers.*.feed_forward{name}? No other rule speaks of it"
        for name in ("", ".gate_proj", ".up_proj", ".down_proj")
    ]


def test_c04_what_would_be_replicated_is_named_with_its_bytes(falcon_h1: nn.Module, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *FALCON_H1, ".layers.*.self_attn.o_proj: rowwise")
    (left,) = findings(plan, falcon_h1)
    nbytes = 2 * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"] * 4 // 1024
    assert (left.code, left.severity) == ("SP104", Severity.ERROR)
    assert left.message == f"no rule decides about model.layers.*.feed_forward (6 parameters, {nbytes}.0 KiB)"


# ---------------------------------------------------------------- C06: with and without dense layers

QWEN3_MOE = (
    *ENDS,
    ".layers.*.{input,post_attention}_layernorm: sequence_parallel",
    ".norm: {style: sequence_parallel, output: stream -> replicate}",
    ".layers.*.{self_attn,mlp}: block",
    ".layers.*.self_attn.{q,k,v}_proj: colwise",
    ".layers.*.self_attn.{q,k}_norm: replicated_with_grad_allreduce",
    ".layers.*.self_attn.o_proj: rowwise",
    ".layers.*.mlp.gate: replicated_with_grad_allreduce",
    ".layers.*.mlp.experts.gate_up_proj: {style: shard, dim: 1, sections: [gate: 1, up: 1]}",
    ".layers.*.mlp.experts.down_proj: {style: shard, dim: 2}",
)
DENSE = (".layers.*.mlp.{gate,up}_proj?: colwise", ".layers.*.mlp.down_proj?: rowwise")


def qwen3_moe(*dense_layers: int) -> nn.Module:
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **MOE, mlp_only_layers=list(dense_layers)))


@pytest.mark.parametrize("dense_layers", [(), (0,)])
def test_c06_one_plan_serves_both(dense_layers: tuple[int, ...], tmp_path: Path) -> None:
    assert findings(plan_of(tmp_path, *QWEN3_MOE, *DENSE), qwen3_moe(*dense_layers)) == []


def test_c06_without_the_mark_a_dead_rule_is_an_error(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *QWEN3_MOE, *[rule.replace("?", "") for rule in DENSE])
    assert errors(findings(plan, qwen3_moe(0))) == ()
    dead = findings(plan, qwen3_moe())
    assert [finding.code for finding in dead] == ["SP102"] * 3
    assert len(errors(dead)) == 3


def test_c06_a_typo_under_the_mark_surfaces(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *QWEN3_MOE, DENSE[0].replace("up", "upp"), DENSE[1])
    typo, left = findings(plan, qwen3_moe(0))
    assert (typo.code, typo.severity, left.code) == ("SP102", Severity.NOTE, "SP203")
    assert "model.layers.*.mlp.up_proj" in typo.hint


def test_c06_keys_of_transformers_that_match_nothing_are_kept_apart() -> None:
    """Its own plan for Qwen3-MoE speaks of dense layers, too."""
    dead = hf_plan(take_inventory(qwen3_moe())).unmatched
    assert {key.rpartition(".")[2] for key in dead} >= {"gate_proj", "up_proj", "down_proj"}
    assert hf_plan(take_inventory(qwen3_moe(0))).unmatched == ()


# ---------------------------------------------------------------- torchtune and torchtitan


@pytest.mark.parametrize("name", foreign_models.PLANS)
def test_plans_of_torchtune_and_torchtitan_pass(name: str) -> None:
    layer, plan = foreign_models.PLANS[name]
    model = foreign_models.meta(layer)
    assert errors(check_plan(plan, model, "dp=2,tp=2")) == ()


def test_names_within_a_layer_are_told_what_they_lack() -> None:
    """torchtitan applies its plan layer by layer."""
    found = check_plan(foreign_models.titan_layer(), foreign_models.meta(foreign_models.TitanLayer), "tp=2")
    (misplaced,) = [finding for finding in found if finding.code == "SP102"]
    assert misplaced.message == "11 patterns match nothing in Decoder, such as attention_norm"
    assert misplaced.hint == "they match if prefixed with layers.*"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("torchtune", "dp=1,tp=2"),
        ("torchtune, sequence parallel", "tp=2"),
        ("torchtune, sequence parallel", "dp=1,tp=2"),
        ("torchtitan", "dp=1,tp=2"),
    ],
)
def test_they_are_exact(pool: Pool, name: str, mesh: str) -> None:
    assert pool.run(2, foreign_models.compare, name, mesh) == [[], []]
