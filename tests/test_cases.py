"""Faults that users reported in public, retold: what the check says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

import broken_models
from shardplan.api import check_plan, compile_plan
from shardplan.diagnostics import Diagnostic, Severity, errors
from shardplan.inventory import take_inventory
from shardplan.merge import read_plan
from shardplan.patterns import parse_pattern
from shardplan.references import build_meta_model
from shardplan.resolve import resolve
from tiny_models import build_meta

PLAN = Path(__file__).parents[1] / "plans" / "llama.yaml"
# The cases' tiny Llama: hidden 32, intermediate 48, 4 heads, 2 KV heads, head_dim 8, vocabulary 32, untied.
CASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip


def tiny(**changes: Any) -> nn.Module:
    return build_meta("llama", **{**CASE, **changes})


def overlay(folder: Path, *rules: str) -> list[Path]:
    path = folder / "overlay.yaml"
    path.write_text("format: 1\nrules:\n" + "".join(f"  {rule}\n" for rule in rules))
    return [PLAN, path]


def written(folder: Path, *rules: str, root: str = "model") -> Path:
    path = folder / "plan.yaml"
    path.write_text(f"format: 1\nroot: [{root}]\nrules:\n" + "".join(f"  {rule}\n" for rule in rules))
    return path


def findings(plan: Any, model: nn.Module, mesh: str = "tp=2", **options: Any) -> list[Diagnostic]:
    return list(check_plan(plan, model, mesh, **options))


def only(found: list[Diagnostic], code: str) -> Diagnostic:
    assert [finding.code for finding in found] == [code], [str(finding) for finding in found]
    return found[0]


class Layers(nn.Module):
    """Two layers of an MLP that a plan may name as it likes."""

    def __init__(self, features: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(features, inner) for _ in range(2))


class Layer(nn.Module):
    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, inner), nn.Linear(inner, features)


def mlp(**sizes: int) -> nn.Module:
    with torch.device("meta"):
        return Layers(**sizes)


# ---------------------------------------------------------------- C08: precedence


def speakers(plan: Path, model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The lines that speak about each module, the winner first."""
    resolved = resolve(read_plan(plan), take_inventory(model))
    return {m.fqn: tuple(f"{c.rule.pattern}: {c.rule.style}" for c in m.speakers) for m in resolved.modules}


def test_c08_the_more_specific_of_two_rules_decides_once(tmp_path: Path) -> None:
    plan = written(tmp_path, "layers.*.up: colwise", "layers.0.up: colwise", "layers.*.down: rowwise", root='""')
    assert speakers(plan, mlp())["layers.0.up"] == ("layers.0.up: colwise", "layers.*.up: colwise")
    assert speakers(plan, mlp())["layers.1.up"] == ("layers.*.up: colwise",)
    compiled = compile_plan(plan, mlp(), "tp=2")
    (module,) = [module for module in compiled.modules if module.fqn == "layers.0.up"]
    assert str(module.where) == f"{plan}:5:3"


@pytest.mark.parametrize("order", [1, -1])
def test_c08_a_range_beats_a_star_whatever_the_order(tmp_path: Path, order: int) -> None:
    rules = ("layers.*.up: colwise", "layers.[0-1].up: rowwise")[::order]
    for layer in (0, 1):
        said = speakers(written(tmp_path, *rules, root='""'), mlp())[f"layers.{layer}.up"]
        assert said == ("layers.[0-1].up: rowwise", "layers.*.up: colwise")


# ---------------------------------------------------------------- C09, C11: patterns


def matches(pattern: str, model: nn.Module) -> list[str]:
    names = [fqn for fqn, _ in model.named_modules()]
    (alternative,) = parse_pattern(pattern).alternatives
    return [fqn for fqn in names if alternative.matches(fqn)]


@pytest.fixture(scope="module")
def multimodal() -> nn.Module:
    return build_meta_model("gemma-3-4b")


def test_c09_a_star_is_one_token_and_patterns_are_anchored(multimodal: nn.Module) -> None:
    assert matches("*.q_proj", multimodal) == []
    assert matches("*.layers.*.self_attn.q_proj", multimodal) == []
    in_text = matches("model.language_model.layers.*.self_attn.q_proj", multimodal)
    everywhere = matches("**.q_proj", multimodal)
    in_tower = [fqn for fqn in everywhere if "vision_tower" in fqn]
    assert (len(in_text), len(in_tower), len(everywhere)) == (34, 27, 61)
    assert matches("**.mlp.gate", multimodal) == []


def test_c09_a_tower_caught_by_accident_is_named(multimodal: nn.Module, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text('format: 1\nextends: gemma3\nrules:\n  "**.self_attn.{q,k,v}_proj": colwise\n')
    found = only(findings(plan, multimodal, "tp=4"), "SP203")
    assert "out_proj stays whole in model.vision_tower.encoder.layers.*.self_attn, " in found.message
    assert found.hint.startswith("if **.self_attn.{q,k,v}_proj is not meant to reach model.vision_tower.")
    assert "write model.language_model.layers.*.self_attn.q_proj, " in found.hint


def test_c11_a_text_plan_on_the_multimodal_class(multimodal: nn.Module, tmp_path: Path) -> None:
    body = (PLAN.parent / "gemma3.yaml").read_text()
    text_only = re.sub(r"(?m)^root:.*$", "root: [model]", body)
    text_only = re.sub(r"(?m)^  .*(vision|projector).*\n", "", text_only)
    plan = tmp_path / "plan.yaml"
    plan.write_text(text_only)
    found = findings(plan, multimodal, "tp=2")
    wrong_root = [finding for finding in found if finding.code == "SP102"]
    assert len(wrong_root) == 1
    assert "match if prefixed with model.language_model" in wrong_root[0].hint
    assert re.search(r"match \d+ modules", wrong_root[0].expected)
    towers = [finding for finding in found if finding.code == "SP104"]
    assert {finding.subject for finding in towers} == {"model.vision_tower", "model.multi_modal_projector"}
    assert {finding.code for finding in found} == {"SP102", "SP104"}


def test_c11_full_paths_say_what_they_lack(multimodal: nn.Module, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("format: 1\nextends: gemma3\nrules:\n  model.layers.*.self_attn.q_proj: colwise\n")
    found = only(findings(plan, multimodal, "tp=2"), "SP102")
    assert found.hint == (
        "it matches if prefixed with "
        "model.language_model (34 modules, such as model.language_model.layers.0.self_attn.q_proj) or "
        "model.vision_tower.encoder (27 modules, such as model.vision_tower.encoder.layers.0.self_attn.q_proj)"
    )


# ---------------------------------------------------------------- C14, C16, C39: sizes


ODD = {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6}


@pytest.mark.parametrize(
    ("sizes", "tp", "said", "degrees"),
    [
        ({"num_key_value_heads": 1}, 2, "4 heads, 1 KV heads, head_dim 8", "1"),
        (ODD, 4, "3 heads, 3 KV heads, head_dim 6", "1 or 3"),
        ({"num_key_value_heads": 2, "head_dim": 16}, 4, "4 heads, 2 KV heads, head_dim 16", "1 or 2"),
    ],
)
def test_c14_heads_are_not_torn_apart(sizes: dict[str, int], tp: int, said: str, degrees: str) -> None:
    found = only(findings(PLAN, tiny(**sizes), f"tp={tp}"), "SP201")
    assert found.message == f"tp={tp} does not divide the heads of model.layers.*.self_attn: {said}"
    assert found.expected == f"a tp that divides both: {degrees}"


def test_c16_a_pair_that_does_not_divide(tmp_path: Path) -> None:
    plan = written(tmp_path, "layers.*: block", "layers.*.up: colwise", "layers.*.down: rowwise", root='""')
    found = only(findings(plan, mlp(features=4, inner=5)), "SP202")
    assert found.message == "layers.*: up and down share a dim of 5, which over tp=2 would be cut into 3+2"
    found = only(findings(PLAN, tiny(intermediate_size=49)), "SP202")
    assert (
        "gate_proj, up_proj and down_proj share a dim of 49, which over tp=2 would be cut into 25+24" in found.message
    )
    assert found.expected == "a tp that divides 49: 1, 7 or 49"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [33, 99])
def test_c39_a_vocabulary_need_not_divide(vocabulary: int, tied: bool, sequence_parallel: bool) -> None:
    model = tiny(vocab_size=vocabulary, tie_word_embeddings=tied)
    assert findings(PLAN, model, "dp=2,tp=2", sequence_parallel=sequence_parallel) == []


def test_c39_but_every_rank_needs_a_row() -> None:
    found = only(findings(PLAN, tiny(vocab_size=5, num_key_value_heads=4), "tp=4"), "SP202")
    assert "model.embed_tokens and lm_head share a dim of 5, " in found.message
    assert "over tp=4 would be cut into 2+2+1+0: a rank without a row" in found.message


# ---------------------------------------------------------------- C19, C20, C21: groups and ties


def without(folder: Path, old: str, new: str) -> Path:
    text = PLAN.read_text()
    assert old in text
    path = folder / "plan.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_c19_a_plan_without_v(tmp_path: Path) -> None:
    found = only(findings(without(tmp_path, "{q,k,v}_proj", "{q,k}_proj"), tiny()), "SP203")
    assert found.message == (
        "v_proj stays whole in block model.layers.*.self_attn, "
        "where q_proj and k_proj are colwise and o_proj is rowwise"
    )
    assert found.hint == "make v_proj colwise: o_proj takes in parts what it gives"


def test_c19_a_plan_without_o(tmp_path: Path) -> None:
    found = only(findings(without(tmp_path, "{self_attn.o,mlp.down}_proj", "mlp.down_proj"), tiny()), "SP203")
    assert found.message == (
        "o_proj stays whole in block model.layers.*.self_attn, where q_proj, k_proj and v_proj are colwise"
    )
    assert found.hint == "make o_proj rowwise: it takes what q_proj, k_proj and v_proj give in parts"


class OwnStyle(ParallelStyle):
    """One of the user's, of which nothing is known."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


def test_a_torch_style_of_ones_own_is_not_judged_by_its_siblings() -> None:
    plan = {"model.layers.*.self_attn.v_proj": OwnStyle()}
    assert not errors(findings([PLAN, plan], tiny()))


def test_c20_packed_projections_are_not_cut_as_one(tmp_path: Path) -> None:
    rules = (
        ".embed_tokens: embedding_rowwise",
        ".layers.*.{input,post_attention}_layernorm: sequence_parallel",
        ".layers.*.{self_attn,mlp}: block",
        ".layers.*.{self_attn.qkv,mlp.gate_up}_proj: colwise",
        ".layers.*.{self_attn.o,mlp.down}_proj: rowwise",
        ".norm: {style: sequence_parallel, output: stream -> replicate}",
        "lm_head: colwise",
    )
    with torch.device("meta"):
        model = broken_models.phi3()
    found = findings(written(tmp_path, *rules), model)
    assert [finding.code for finding in found] == ["SP105", "SP105"]
    assert "it packs sections of 32, 16, 16," in found[0].message
    assert "it packs sections of 48, 48," in found[1].message


def test_c21_a_tied_pair_with_both_ends_cut_is_one_parameter() -> None:
    compiled = compile_plan(PLAN, tiny(tie_word_embeddings=True), "tp=2")
    ends = [p for m in compiled.modules if m.fqn in ("lm_head", "model.embed_tokens") for p in m.parameters]
    assert len(ends) == 2
    assert len({(parameter.identity, str(parameter.placement)) for parameter in ends}) == 1


def test_c21_only_the_head_is_named(tmp_path: Path) -> None:
    plan = without(tmp_path, "  .embed_tokens: embedding_rowwise\n", "")
    found = only(findings(plan, tiny(tie_word_embeddings=True)), "SP205")
    assert found.message == (
        "tied parameters are placed differently: "
        "model.embed_tokens.weight replicate (no rule) and lm_head.weight shard(0)"
    )
    assert found.hint == "`.embed_tokens: embedding_rowwise` and `lm_head: colwise` both cut the vocabulary"


def test_c21_ends_that_cut_different_dims(tmp_path: Path) -> None:
    plan = without(tmp_path, "embedding_rowwise", "embedding_colwise")
    found = only(findings(plan, tiny(tie_word_embeddings=True)), "SP205")
    assert "model.embed_tokens.weight shard(1) and lm_head.weight shard(0)" in found.message
    assert findings(plan, tiny(tie_word_embeddings=False)) == []


# ---------------------------------------------------------------- C04, C06, C30: names and norms


def test_c04_another_name_for_the_same_module(tmp_path: Path) -> None:
    found = findings(without(tmp_path, "mlp", "feed_forward"), tiny())
    assert {finding.code for finding in found} == {"SP102"}
    assert "did you mean model.layers.*.mlp?" in "\n".join(finding.hint for finding in found)


def test_c06_an_optional_rule_may_be_dead_but_a_typo_in_it_surfaces(tmp_path: Path) -> None:
    assert findings(overlay(tmp_path, ".layers.*.mlp.experts?: null"), tiny()) == []
    typo = without(tmp_path, ".layers.*.mlp.{gate,up}_proj:", ".layers.*.mlp.{gate,upp}_proj?:")
    found = findings(typo, tiny())
    assert [finding.code for finding in found] == ["SP102", "SP203"]
    assert found[0].severity is Severity.NOTE
    assert "model.layers.*.mlp.up_proj" in found[0].hint


def test_c30_a_norm_between_the_cut_linears(tmp_path: Path) -> None:
    model = build_meta_model("qwen3-8b")
    plan = (PLAN.parent / "qwen2.yaml").read_text()
    path = tmp_path / "plan.yaml"
    path.write_text(re.sub(r"(?m)^.*_norm\?.*\n", "", plan))
    found = findings(path, model)
    assert {finding.code for finding in found} == {"SP104"}
    assert "q_norm" in found[0].message


def test_c38_an_activation_sent_three_times(tmp_path: Path) -> None:
    plan = without(tmp_path, "{self_attn,mlp}: block", "mlp: block")
    found = only(findings(plan, tiny()), "SP207")
    assert found.severity is Severity.WARNING
    assert "which sends it 3 times" in found.message
    assert not errors([found])
