"""What is written in vain, and what stays whole: said, and said once."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden import ROOT
from shardplan.api import check_plan
from shardplan.diagnostics import Diagnostic, Severity
from tiny_models import build_meta

PLAN = ROOT / "plans" / "llama.yaml"


def said(folder: Path, text: str, mesh: str = "dp=2,tp=2", *, overlay: bool = True) -> list[Diagnostic]:
    path = folder / "plan.yaml"
    path.write_text(f"format: 1\n{text}")
    return list(check_plan([PLAN, path] if overlay else path, build_meta("llama"), mesh))


def codes(found: list[Diagnostic]) -> list[tuple[str, Severity]]:
    return [(finding.code, finding.severity) for finding in found]


def edited(folder: Path, old: str, new: str) -> list[Diagnostic]:
    source = PLAN.read_text()
    assert old in source
    path = folder / "plan.yaml"
    path.write_text(source.replace(old, new))
    return list(check_plan(path, build_meta("llama"), "dp=2,tp=2"))


@pytest.mark.parametrize("value", ["null", "replicate", "sequence_parallel", "{input: stream, output: stream}"])
def test_a_rule_for_what_has_no_parameters_does_nothing(tmp_path: Path, value: str) -> None:
    assert codes(edited(tmp_path, ".rotary_emb: rotary", f".rotary_emb: {value}")) == [("SP110", Severity.WARNING)]


def test_a_rule_that_only_guards_does_something(tmp_path: Path) -> None:
    assert said(tmp_path, "rules: {.rotary_emb: rotary}\n") == []


def test_a_rule_that_others_override_does_nothing(tmp_path: Path) -> None:
    rules = "rules:\n  .layers.*.mlp.up_proj: colwise\n  .layers.[0-1].mlp.up_proj: colwise\n"
    found = said(tmp_path, rules)
    assert codes(found) == [("SP110", Severity.WARNING)]
    assert ".layers.[0-1].mlp.up_proj" in found[0].message


def test_a_rule_that_overrides_a_lower_layer_does_something(tmp_path: Path) -> None:
    rules = "rules:\n  .layers.0.mlp.{gate,up,down}_proj: null\n  .layers.0.mlp: null\n"
    assert "SP110" not in {finding.code for finding in said(tmp_path, rules)}


def test_an_edge_before_an_embedding_is_never_run(tmp_path: Path) -> None:
    rules = "rules:\n  .embed_tokens: {style: embedding_rowwise, input: replicate -> shard(-1)}\n"
    assert codes(said(tmp_path, rules)) == [("SP110", Severity.WARNING)]


@pytest.mark.parametrize("edge", ["replicate -> stream", "replicate -> shard(-1)", "stream -> replicate"])
def test_an_edge_before_position_tables_is_never_run(tmp_path: Path, edge: str) -> None:
    found = said(tmp_path, f"rules:\n  .rotary_emb: {{style: rotary, input: {edge}}}\n")
    assert codes(found) == [("SP110", Severity.WARNING)]
    assert "takes an activation for its dtype and device alone" in found[0].message


def test_an_embedding_left_whole_is_said_with_its_bytes(tmp_path: Path) -> None:
    (found,) = said(tmp_path, "rules: {.embed_tokens: null}\n")
    assert (found.code, found.severity) == ("SP211", Severity.NOTE)
    assert "64.0 KiB on every tp rank, where a cut would leave 32.0 KiB" in found.message


def test_without_tp_everything_is_whole_and_nothing_is_said(tmp_path: Path) -> None:
    assert said(tmp_path, "rules: {.embed_tokens: null}\n", mesh="dp=2") == []


@pytest.mark.parametrize(
    ("logits", "code"), [("", "SP211"), ("logits: sharded\n", "SP212"), ("logits: gathered\n", "")]
)
def test_c41_a_gathered_head_against_what_the_plan_says(tmp_path: Path, logits: str, code: str) -> None:
    found = said(tmp_path, f"{logits}rules: {{lm_head: colwise_gather_output}}\n")
    assert [finding.code for finding in found] == ([code] if code else [])


def test_layers_without_units_are_gathered_at_once(tmp_path: Path) -> None:
    found = edited(tmp_path, 'units: {".layers.*": {}}', "units: {.layers.0: {}}")
    assert found == []  # one bare layer is what the outermost unit is for
    found = edited(tmp_path, 'units: {".layers.*": {}}', "units: {}")
    assert codes(found) == [("SP111", Severity.WARNING)]
    assert "2 of 2 decoder layers" in found[0].message


def test_a_unit_around_the_layers(tmp_path: Path) -> None:
    found = edited(tmp_path, 'units: {".layers.*": {}}', 'units: {".layers.*": {}, ".": {}}')
    assert codes(found) == [("SP111", Severity.WARNING)]


@pytest.mark.parametrize(("policy", "number"), [("param: bfloat16", 1), ("param: bfloat16, reduce: float32", 0)])
def test_gradients_added_up_in_half_precision(tmp_path: Path, policy: str, number: int) -> None:
    found = said(tmp_path, f"mixed_precision: {{{policy}}}\n")
    assert [finding.code for finding in found] == ["SP213"] * number


def test_a_style_for_another_kind_that_does_the_same_is_a_warning(tmp_path: Path) -> None:
    found = said(tmp_path, "rules: {'.layers.*.mlp.up_proj': embedding_colwise}\n")
    assert codes(found) == [("SP105", Severity.WARNING)]


def test_a_rule_that_names_all_parameters_of_a_linear_speaks_of_it(tmp_path: Path) -> None:
    assert said(tmp_path, "rules: {'.layers.*.mlp.up_proj.*': colwise}\n") == []
