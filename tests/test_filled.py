"""What a plan leaves open is filled by transformers' own: said, whole groups at a time, and right by numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import parity
import tiny_models
from parity import Batch, Case
from pool import Pool
from shardplan import check_plan, compile_plan
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.facts import in_situation
from shardplan.hf.known import KNOWN_WRONG, Wrong

MLP = """\
rules:
  model.layers.*.mlp: block
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
"""
ATTENTION_WITHOUT_BLOCK = """\
rules:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(f"format: 1\n{text}")
    return path


def said(folder: Path, text: str, **options: Any) -> list[Diagnostic]:
    return list(check_plan(written(folder, text), tiny_models.build_meta("llama"), "dp=2,tp=2", **options))


def compiled(plan: Any, *, sequence_parallel: bool = False) -> CompiledPlan:
    return compile_plan(plan, tiny_models.build_meta("llama"), "dp=2,tp=2", sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_plan_of_a_part_comes_to_the_shipped_one(tmp_path: Path, sequence_parallel: bool) -> None:
    filled = compiled(written(tmp_path, MLP), sequence_parallel=sequence_parallel)
    shipped = compiled("llama", sequence_parallel=sequence_parallel)
    assert set(in_situation(filled)) ^ set(in_situation(shipped)) == set()


def test_what_is_filled_is_said(tmp_path: Path) -> None:
    found = said(tmp_path, MLP)
    assert {(note.code, note.severity) for note in found} == {("SP104", Severity.NOTE)}
    decides = "transformers' own plan decides about"
    assert [note.message for note in found] == [
        f"{decides} 15 parameters (225.2 KiB) of which no rule speaks: model.embed_tokens, "
        "model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj and 6 more",
        f"{decides} the edges of modules of which no rule speaks: model.layers.0, model.layers.*.self_attn and "
        "model.rotary_emb",
        f"{decides} FSDP2 units of which no rule speaks: model.layers.*",
    ]


def test_a_tied_parameter_is_said_once(tmp_path: Path) -> None:
    found = check_plan(written(tmp_path, MLP), tiny_models.build_meta("llama-tied"), "tp=2")
    assert found[0].message.startswith("transformers' own plan decides about 14 parameters")


def test_without_the_fallback_it_is_missing(tmp_path: Path) -> None:
    found = said(tmp_path, f"fallback: none\n{MLP}")
    assert {finding.subject for finding in found if finding.severity is Severity.ERROR} == {
        "model.embed_tokens", "model.layers.*.self_attn", "lm_head",
    }  # fmt: skip


@pytest.mark.parametrize("left_out", ["v_proj", "o_proj"])
def test_what_is_written_in_part_is_not_completed(tmp_path: Path, left_out: str) -> None:
    text = ATTENTION_WITHOUT_BLOCK.replace("q,k,v", "q,k") if left_out == "v_proj" else ""
    text = text or "\n".join(ATTENTION_WITHOUT_BLOCK.splitlines()[:-1]) + "\n"
    first = next(finding for finding in said(tmp_path, text) if finding.severity is Severity.ERROR)
    assert (first.code, str(first.where)) == ("SP203", f"{tmp_path}/plan.yaml:3:3")
    assert first.message.endswith(f"are written, and transformers' own plan would add {left_out}")


@pytest.mark.parametrize(
    ("model", "rules", "message"),
    [
        (
            "qwen2",
            "model.layers.*.self_attn.q_proj.*: colwise",
            "q_proj of block model.layers.*.self_attn is written, and transformers' own plan would add k_proj, v_proj "
            "and o_proj",
        ),
        (
            "llama-biased",
            "model.layers.*.mlp.{gate,up,down}_proj.bias: null",
            "gate_proj, up_proj and down_proj of block model.layers.*.mlp are written, and transformers' own plan "
            "would add the rest of gate_proj, the rest of up_proj and the rest of down_proj",
        ),
        (
            "mixtral",
            "model.layers.*.mlp.experts.down_proj: {style: shard, dim: 2}",
            "down_proj of model.layers.*.mlp.experts is written, and transformers' own plan would add gate_up_proj",
        ),
    ],
)
def test_nor_is_what_is_written_by_its_parameters(tmp_path: Path, model: str, rules: str, message: str) -> None:
    built = tiny_models.build_meta(model)
    found = check_plan(written(tmp_path, f"rules:\n  {rules}\n"), built, "tp=2")
    assert message in [finding.message for finding in found if finding.code == "SP203"]


def test_a_linear_that_nobody_cuts_may_be_written_alone(tmp_path: Path) -> None:
    rules = "rules: {model.layers.*.mlp.shared_expert_gate: replicated_with_grad_allreduce}\n"
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(num_hidden_layers=1, num_experts=4, vocab_size=64))
    found = check_plan(written(tmp_path, rules), model, "tp=2")
    assert {finding.severity for finding in found} == {Severity.NOTE}


def test_written_in_part_by_a_name_that_does_not_exist_is_said_once(tmp_path: Path) -> None:
    found = said(tmp_path, ATTENTION_WITHOUT_BLOCK.replace("o_proj", "o_prj"))
    errors = [finding.code for finding in found if finding.severity is Severity.ERROR]
    assert errors == ["SP102"]


def test_no_block_is_put_around_what_is_written_without_one(tmp_path: Path) -> None:
    modules = compiled(written(tmp_path, ATTENTION_WITHOUT_BLOCK)).by_fqn
    assert modules["model.layers.0.self_attn.q_proj"].block is None
    assert modules["model.layers.0.mlp.up_proj"].block == "model.layers.0.mlp"


def test_units_are_filled_where_there_are_none(tmp_path: Path) -> None:
    assert [unit.fqn for unit in compiled(written(tmp_path, MLP)).units] == ["model.layers.0", "model.layers.1"]
    own = f"{MLP}fsdp: {{units: {{model.layers.0: {{}}}}}}\n"
    assert [unit.fqn for unit in compiled(written(tmp_path, own)).units] == ["model.layers.0"]


def test_a_plan_that_is_known_to_be_wrong_matters_where_it_fills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(KNOWN_WRONG, "LlamaForCausalLM", Wrong("put here"))
    assert "SP106" in {finding.code for finding in said(tmp_path, MLP)}
    assert said(tmp_path, "extends: llama\nfallback: hf\n") == []


def test_a_model_without_a_plan_is_filled_by_nothing(tmp_path: Path) -> None:
    model = tiny_models.build_meta("gpt2")
    found = check_plan(written(tmp_path, "rules: {lm_head: colwise}\n"), model, "tp=2")
    assert {finding.code for finding in found if finding.severity is Severity.ERROR} >= {"SP104"}


@pytest.mark.processes
@pytest.mark.parametrize("text", [MLP, ATTENTION_WITHOUT_BLOCK], ids=["mlp", "attention"])
def test_what_is_filled_is_right(pool: Pool, tmp_path: Path, text: str) -> None:
    case = Case("llama", "dp=2,tp=2", sequence_parallel=False, plan=written(tmp_path, text), training=False)
    assert pool.run(4, parity.compare, case, [Batch(), Batch(length=5, mask=True)], shared=True) == [[]] * 4
