"""A plan that extends a shipped one: what is said is said where its author can act on it, and once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from golden import ROOT
from shardplan.api import check_plan
from shardplan.cli import command
from shardplan.diagnostics import Diagnostic, Severity
from tiny_models import build_meta

SHIPPED = ROOT / "plans" / "llama.yaml"
MISPLACED_NORM = "{style: sequence_parallel, output: replicate -> stream}"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def said(folder: Path, pattern: str, value: str, *, sequence_parallel: bool = True) -> list[Diagnostic]:
    """The findings of one rule on top of the shipped plan."""
    (folder / "plan.yaml").write_text(f"format: 1\nextends: llama\nrules:\n  {pattern}: {value}\n")
    return list(check_plan(folder / "plan.yaml", build_meta("llama"), "dp=2,tp=2", sequence_parallel=sequence_parallel))


def line(text: str) -> int:
    """Where the shipped plan says something."""
    return next(n for n, written in enumerate(SHIPPED.read_text().splitlines(), 1) if text in written)


# ---------------------------------------------------------------- the line of the upper layer


@pytest.mark.parametrize(
    ("pattern", "value", "code"),
    [
        (".layers.*.self_attn.q_proj", "null", "SP203"),
        (".layers.*.self_attn.q_proj", "rowwise", "SP203"),
        (".layers.*.mlp.down_proj", "colwise", "SP203"),
        (".layers.*.mlp.down_proj", "replicated_with_grad_allreduce", "SP203"),
        (".layers.*.self_attn.k_proj.*", "null", "SP105"),
        (".layers.*.mlp", "{input: stream}", "SP204"),
        (".embed_tokens", "sequence_parallel", "SP204"),
        (".layers.0", "null", "SP204"),
        (".layers.0", "block", "SP204"),
        (".norm", "block", "SP206"),
        (".layers.*.input_layernorm", "block", "SP206"),
        (".embed_tokens", "block", "SP211"),
    ],
)
def test_a_finding_is_located_at_the_rule_of_the_upper_layer(
    tmp_path: Path, pattern: str, value: str, code: str
) -> None:
    found = said(tmp_path, pattern, value)
    assert code in {finding.code for finding in found}
    assert {str(finding.where) for finding in found} == {f"{tmp_path}/plan.yaml:4:3"}


def test_the_rule_below_is_named_in_the_text(tmp_path: Path) -> None:
    (finding,) = said(tmp_path, ".layers.*.self_attn.q_proj", "null")
    assert (
        f"k_proj and v_proj are colwise and o_proj is rowwise (see plans/llama.yaml:{line('{q,k,v}')}:3)"
        in finding.message
    )


def test_units_that_separate_tied_parameters_are_located_in_the_upper_layer(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("format: 1\nextends: llama\nfsdp: {units: {.embed_tokens: {}}}\n")
    (tmp_path / "plan.yaml").write_text("format: 1\nextends: base.yaml\nfsdp: {units: {lm_head: {}}}\n")
    (finding,) = check_plan(tmp_path / "plan.yaml", build_meta("llama-tied"), "dp=2,tp=2")
    assert (finding.code, str(finding.where)) == ("SP109", f"{tmp_path}/plan.yaml:3:16")


# ---------------------------------------------------------------- one fault, one finding


@pytest.mark.parametrize(
    ("pattern", "value", "message"),
    [
        (".norm", MISPLACED_NORM, "nothing gathers the residual stream before the head"),
        (".norm", "{output: stream}", "nothing gathers the residual stream before the head"),
        (
            ".norm",
            "{style: sequence_parallel, input: replicate -> stream}",
            "the residual stream is cut more than once",
        ),
        (".layers.0", MISPLACED_NORM, "nothing cuts the residual stream"),
        (".rotary_emb", "block", "model.rotary_emb takes stream, but finds replicate, and gives stream where"),
        (".rotary_emb", "{output: stream -> shard(-1)}", "output of model.rotary_emb: there is no collective from"),
        ("lm_head", MISPLACED_NORM, "sequence_parallel gives stream, but the rule for lm_head says output"),
        ("lm_head", "{style: sequence_parallel, input: replicate -> stream}", "the residual stream is cut more"),
        (".embed_tokens", MISPLACED_NORM, "the residual stream is cut more than once"),
        (".layers.*.mlp.up_proj", MISPLACED_NORM, "the rule for up_proj converts the output inside block"),
    ],
)
def test_one_wrong_edge_is_one_finding(tmp_path: Path, pattern: str, value: str, message: str) -> None:
    edges = [finding for finding in said(tmp_path, pattern, value) if finding.code == "SP204"]
    assert [(finding.message.startswith(message), finding.severity) for finding in edges] == [(True, Severity.ERROR)]
    assert str(edges[0].where) == f"{tmp_path}/plan.yaml:4:3"


def test_a_decoder_layer_is_no_block(tmp_path: Path) -> None:
    """It would add up the residual stream, tp times."""
    (tmp_path / "plan.yaml").write_text("format: 1\nextends: gpt2\nrules: {.h.*: block}\n")
    found = check_plan(tmp_path / "plan.yaml", build_meta("gpt2"), "tp=2")
    (layer,) = [finding for finding in found if finding.code == "SP204"]
    assert (layer.severity, layer.subject) == (Severity.ERROR, "transformer.h.*")
    assert layer.message.endswith("and its rule adds up over tp what it gives, the residual stream with it")


def test_a_cut_at_the_list_of_layers_makes_no_layers_of_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("format: 1\nextends: llama\nrules: {.layers: {input: replicate -> stream}}\n")
    found = check_plan(tmp_path / "plan.yaml", build_meta("llama"), "tp=2")
    assert [finding for finding in found if finding.severity is Severity.ERROR] == []


def test_the_gather_is_asked_for_at_the_module_that_stands_there(tmp_path: Path) -> None:
    (finding,) = said(tmp_path, ".norm", MISPLACED_NORM)
    assert finding.hint.endswith("`.norm: {style: sequence_parallel, output: stream -> replicate}`")


def test_separate_faults_are_all_said(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("format: 1\nextends: llama\nrules: {.norm: null, .layers.0: null}\n")
    found = check_plan(tmp_path / "plan.yaml", build_meta("llama"), "tp=2", sequence_parallel=True)
    assert [finding.message.split(" the residual")[0] for finding in found if finding.code == "SP204"] == [
        "nothing cuts",
        "nothing gathers",
    ]


# ---------------------------------------------------------------- rules that were written for other models


def lacking(folder: Path, text: str = "") -> list[Diagnostic]:
    """The findings of a plan on top of the shipped one, for a model without one of the norms that it names."""
    (folder / "plan.yaml").write_text(f"format: 1\nextends: llama\n{text}")
    model = build_meta("llama")
    for layer in model.get_submodule("model.layers").children():
        layer.post_attention_layernorm = None  # type: ignore[assignment]
    return list(check_plan(folder / "plan.yaml", model, "dp=2,tp=2", sequence_parallel=True))


@pytest.mark.parametrize("rules", ["", "rules: {.norm: {style: sequence_parallel, output: stream -> replicate}}\n"])
def test_an_inherited_rule_that_matches_nothing_is_a_warning(tmp_path: Path, rules: str) -> None:
    """Whether or not the upper plan has rules of its own."""
    (finding,) = lacking(tmp_path, rules)
    assert (finding.code, finding.severity) == ("SP102", Severity.WARNING)
    assert "'?'" not in finding.expected


def test_what_an_inherited_rule_hints_at_can_be_done(tmp_path: Path) -> None:
    (finding,) = lacking(tmp_path)
    written = finding.hint.split("`")[1]
    assert written == '".layers.*.post_attention_layernorm?": sequence_parallel'
    assert lacking(tmp_path, f"rules:\n  {written}\n") == []


def test_what_an_inherited_unit_hints_at_can_be_done(tmp_path: Path) -> None:
    base = "format: 1\nextends: llama\nfsdp: {units: {.tower.*: {}}}\nrecompute: [.tower.*]\n"
    (tmp_path / "base.yaml").write_text(base)
    upper, model = "format: 1\nextends: base.yaml\n", build_meta("llama")
    (tmp_path / "plan.yaml").write_text(upper)
    unit, recompute = check_plan(tmp_path / "plan.yaml", model, "dp=2,tp=2")
    assert {(f.code, f.severity) for f in (unit, recompute)} == {("SP108", Severity.WARNING)}
    assert '`".tower.*?": {}` under `fsdp: units:`' in unit.hint
    assert '`- ".tower.*?"` under `recompute:`' in recompute.hint
    answered = 'fsdp:\n  units:\n    ".tower.*?": {}\nrecompute:\n- ".tower.*?"\n'
    (tmp_path / "plan.yaml").write_text(upper + answered)
    assert check_plan(tmp_path / "plan.yaml", model, "dp=2,tp=2") == ()


def test_an_inherited_rule_that_does_nothing_is_not_the_plans_own(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("format: 1\nextends: llama\nrules: {.layers.*.mlp.act_fn: null}\n")
    (tmp_path / "plan.yaml").write_text("format: 1\nextends: base.yaml\n")
    model = build_meta("llama")
    assert [finding.code for finding in check_plan(tmp_path / "base.yaml", model, "tp=2")] == ["SP110"]
    assert check_plan(tmp_path / "plan.yaml", model, "tp=2") == ()


def test_a_wrong_root_over_a_shipped_plan_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("format: 1\nextends: llama\nroot: model.layers\n")
    found = [f for f in check_plan(tmp_path / "plan.yaml", build_meta("llama"), "tp=2") if f.code == "SP102"]
    assert [(str(f.where), f.severity) for f in found] == [(f"{tmp_path}/plan.yaml", Severity.ERROR)]
    assert "write `root: [model]`" in found[0].hint


# ---------------------------------------------------------------- findings in a file that the author cannot see


COHERE = ("--model", "broken_models:cohere", "--mesh", "dp=2,tp=2", "--no-sequence-parallel")


def checked(*args: str) -> str:
    return CliRunner().invoke(command, ["--check", *args, *COHERE], catch_exceptions=False).stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two plans that extend one with a rule that finds nothing, which lies outside the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml"):
        Path(name).write_text("format: 1\narchitectures: [CohereForCausalLM]\nextends: llama\n")
    return tmp_path


def test_github_shows_an_inherited_finding_where_the_plan_extends(project: Path) -> None:
    lines = [line for line in checked("a.yaml", "b.yaml", "--format", "github").splitlines() if "SP102" in line]
    assert [line.split("::")[1] for line in lines] == [
        "warning file=a.yaml,line=3,col=1",
        "warning file=b.yaml,line=3,col=1",
    ]
    assert all(f"%0Awritten at: {SHIPPED}:{line('{input,')}:3%0A" in text for text in lines)


def test_github_shows_a_finding_at_its_line_where_the_repository_has_it(project: Path) -> None:
    Path("shipped.yaml").write_text(
        SHIPPED.read_text().replace("architectures: [", "architectures: [CohereForCausalLM, ")
    )
    Path("a.yaml").write_text("format: 1\nextends: shipped.yaml\n")
    (found,) = [text for text in checked("a.yaml", "--format", "github").splitlines() if "SP102" in text]
    assert found.startswith(f"::warning file=shipped.yaml,line={line('{input,')},col=3::")


def test_an_installed_plan_is_none_of_the_repository(project: Path) -> None:
    installed = project / ".venv" / "site-packages" / "base.yaml"
    installed.parent.mkdir(parents=True)
    installed.write_text("format: 1\nextends: llama\nrules: {.nothing: colwise}\n")
    extends = f"extends: {installed.relative_to(project)}\n"
    Path("a.yaml").write_text(f"format: 1\narchitectures: [CohereForCausalLM]\n{extends}")
    lines = [text for text in checked("a.yaml", "--format", "github").splitlines() if "SP102" in text]
    assert {text.split("::")[1] for text in lines} == {"warning file=a.yaml,line=3,col=1"}


def test_an_overlay_without_extends_is_shown_as_a_whole(project: Path) -> None:
    Path("over.yaml").write_text("format: 1\narchitectures: [CohereForCausalLM]\n")
    lines = checked("llama", "--overlay", "over.yaml", "--format", "github").splitlines()
    assert [text.split("::")[1] for text in lines if "SP102" in text] == ["warning file=over.yaml,line=1,col=1"]


def test_the_plan_that_was_asked_about_is_named_where_the_finding_lies_elsewhere(project: Path) -> None:
    found = json.loads(checked("a.yaml", "b.yaml", "--overlay", "b.yaml", "--format", "json"))["findings"]
    situation = "broken_models:cohere dp=2,tp=2 TP"
    on = {finding["code"]: finding["on"] for finding in found}
    assert on["SP102"] == [f"{situation} (plan a.yaml + b.yaml)", f"{situation} (plan b.yaml + b.yaml)"]
    assert on["SP104"] == [situation, situation]
    assert f"on: {situation} (plan a.yaml) and 1 more" in checked("a.yaml", "b.yaml")


# ---------------------------------------------------------------- beside the layers

PARTIAL_STREAM = "{style: embedding_rowwise, output: partial -> stream}"


@pytest.mark.parametrize(("wte", "codes"), [("embedding_rowwise", {"SP206"}), (PARTIAL_STREAM, {"SP204"})])
def test_a_table_of_positions_is_on_the_stream_only_where_the_embedding_cuts_it(
    tmp_path: Path, wte: str, codes: set[str]
) -> None:
    """Elsewhere its gradient is complete, and would be summed to tp times too much. SP204: the cut at .h.0 is left."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"format: 1\nextends: gpt2\nrules:\n  .wte: {wte}\n  .wpe: sequence_parallel\n")
    found = check_plan(plan, build_meta("gpt2"), "tp=2", sequence_parallel=True)
    assert {finding.code for finding in found} == codes
