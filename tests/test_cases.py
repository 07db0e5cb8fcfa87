"""Faults that users reported in public, retold: what the check says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

import case_jobs
import parity
from parity import Batch, Case
from pool import Pool
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
    lines = (f"  {rule}\n" for rule in rules)
    path.write_text(f"format: 1\nroot: [{root}]\nrules:\n{''.join(lines)}fallback: none\n")
    return path


def findings(plan: Any, model: nn.Module, mesh: str = "tp=2", **options: Any) -> list[Diagnostic]:
    return list(check_plan(plan, model, mesh, **options))


def only(found: list[Diagnostic], code: str) -> Diagnostic:
    assert [finding.code for finding in found] == [code], [str(finding) for finding in found]
    return found[0]


def mlp(**sizes: int) -> nn.Module:
    with torch.device("meta"):
        return case_jobs.Layers(**sizes)


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

SP215 = (
    "KV heads replicated x{ranks} in model.layers.*.self_attn, which has {kv_heads} for tp={tp}; "
    "k_proj and v_proj stay cut over all ranks"
)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("sizes", "tp"), [({"num_key_value_heads": 1}, 2), ({"num_key_value_heads": 2, "head_dim": 16}, 4)]
)
def test_c14_ranks_share_heads(pool: Pool, sizes: dict[str, int], tp: int, sequence_parallel: bool) -> None:
    found = only(findings(PLAN, tiny(**sizes), f"tp={tp}", sequence_parallel=sequence_parallel), "SP215")
    assert found.message == SP215.format(ranks=2, kv_heads=sizes["num_key_value_heads"], tp=tp)
    assert found.severity is Severity.NOTE
    case = Case("llama", f"tp={tp}", sequence_parallel, changes={**CASE, **sizes}, training=False)
    assert pool.run(tp, parity.compare, case, [Batch(), Batch(5, mask=True)], shared=True) == [[]] * tp


THREE = {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6}
SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("sizes", "tp", "said", "degrees"),
    [
        (THREE, 4, "3 heads, 3 KV heads, head_dim 6", "1 or 3"),
        ({"num_key_value_heads": 1}, 3, "4 heads, 1 KV heads, head_dim 8", "1, 2 or 4"),
        ({"num_key_value_heads": 2}, 8, "4 heads, 2 KV heads, head_dim 8", "1, 2 or 4"),
        ({**SIX, "head_dim": 6}, 3, "6 heads, 2 KV heads, head_dim 6", "1, 2 or 6"),
        ({**SIX, "head_dim": 8}, 6, "6 heads, 2 KV heads, head_dim 8", "1 or 2"),  # 3 ranks cannot share 8 columns
    ],
)
def test_c14_but_heads_are_not_torn_apart(sizes: dict[str, int], tp: int, said: str, degrees: str) -> None:
    found = only(findings(PLAN, tiny(**sizes), f"tp={tp}"), "SP201")
    assert found.message == f"tp={tp} does not divide the heads of model.layers.*.self_attn: {said}"
    assert found.expected == f"a tp that divides the heads, and the KV heads or is a multiple of them: {degrees}"


PAIR = {"layers.*": "block", "layers.*.up": "colwise", "layers.*.down": "rowwise"}


def test_c16_a_pair_that_does_not_divide_is_exact(pool: Pool) -> None:
    assert findings(PAIR, mlp(features=4, inner=5)) == []
    ranks = pool.run(2, case_jobs.uneven_pair, PAIR, "tp=2", 4, 5)
    assert [parts for parts, _ in ranks] == [
        [[3, 4], [3], [4, 3], [4]],
        [[2, 4], [2], [4, 2], [4]],
    ]
    assert [faults for _, faults in ranks] == [[], []]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_c16_so_is_a_llama(pool: Pool, sequence_parallel: bool) -> None:
    changes = {**CASE, "intermediate_size": 49, "mlp_bias": True}
    assert findings(PLAN, tiny(**changes), sequence_parallel=sequence_parallel) == []
    case = Case("llama", "tp=2", sequence_parallel, changes=changes, training=False)
    assert pool.run(2, parity.compare, case, [Batch(), Batch(5)], shared=True) == [[], []]


def test_c16_but_every_rank_needs_a_row_and_a_gather_equal_parts() -> None:
    found = only(findings(PAIR, mlp(features=4, inner=5), "tp=4"), "SP202")
    assert found.message == (
        "layers.*: up and down share a dim of 5, which over tp=4 would be cut into 2+2+1+0: a rank without a row"
    )
    assert (found.expected, found.hint) == ("at least one row for every rank", "choose a smaller tp")
    gathered = {"layers.*.up": "colwise_gather_output", "layers.*.down": None}
    found = only(findings(gathered, mlp(features=4, inner=5)), "SP202")
    assert found.message == (
        "layers.*: up has a dim of 5, which over tp=2 would be cut into 3+2, which an edge cannot gather or scatter"
    )
    assert found.expected == "a tp that divides 5: 1 or 5"
    assert findings(gathered, mlp(features=4, inner=6)) == []


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [33, 99])
def test_c39_a_vocabulary_need_not_divide(vocabulary: int, tied: bool, sequence_parallel: bool) -> None:
    model = tiny(vocab_size=vocabulary, tie_word_embeddings=tied)
    assert findings(PLAN, model, "dp=2,tp=2", sequence_parallel=sequence_parallel) == []


@pytest.mark.parametrize(
    ("vocabulary", "tied", "mesh", "sequence_parallel"),
    [(33, False, "tp=2", True), (99, True, "tp=2", False), (33, True, "dp=2,tp=2", True), (99, False, "tp=2", False)],
)
def test_c39_and_is_exact(pool: Pool, vocabulary: int, tied: bool, mesh: str, sequence_parallel: bool) -> None:
    changes = {**CASE, "vocab_size": vocabulary, "tie_word_embeddings": tied}
    case = Case("llama", mesh, sequence_parallel, changes=changes, training=False)
    for rank, seen in enumerate(pool.run(case.world_size, case_jobs.vocabulary, case)):
        rows = (vocabulary + 1) // 2 - rank % 2
        assert seen == {"rows": rows, "width": vocabulary, "bit-equal": True, "tied": tied, "faults": []}


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


QKV = "num_attention_heads * head_dim, k: num_key_value_heads * head_dim, v: num_key_value_heads * head_dim"
SECTIONED = (
    f".layers.*.self_attn.qkv_proj: {{style: colwise, sections: [q: {QKV}]}}",
    ".layers.*.mlp.gate_up_proj: {style: colwise, sections: [gate: 1, up: 1]}",
)
AROUND = (
    ".embed_tokens: embedding_rowwise",
    ".rotary_emb: rotary",
    ".layers.0: {input: replicate -> stream}",
    ".layers.*.{input,post_attention}_layernorm: sequence_parallel",
    ".layers.*.{self_attn.o,mlp.down}_proj: rowwise",
    ".norm: {style: sequence_parallel, output: stream -> replicate}",
    "lm_head: {style: colwise, output: shard(-1)}",
)
BLOCKS = ".layers.*.{self_attn,mlp}: block"


def test_c20_packed_projections_are_not_cut_as_one(tmp_path: Path) -> None:
    plan = written(tmp_path, *AROUND, BLOCKS, ".layers.*.{self_attn.qkv,mlp.gate_up}_proj: colwise")
    found = findings(plan, build_meta("phi3", **CASE))
    assert [finding.code for finding in found] == ["SP105", "SP105"]
    assert [finding.message.partition(": ")[2] for finding in found] == [
        f"it packs sections of {sizes}, and a plain cut would give each rank parts of some of them only"
        for sizes in ("32, 16, 16", "48, 48")
    ]
    assert [finding.hint for finding in found] == [
        f"declare them, if they lie one behind the other: `{rule}`" for rule in SECTIONED
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_c20_what_the_findings_say_to_write_is_exact(pool: Pool, tmp_path: Path, sequence_parallel: bool) -> None:
    """First the sections, then what counts heads."""
    model = build_meta("phi3", **CASE)
    found = only(findings(written(tmp_path, *AROUND, BLOCKS, *SECTIONED), model), "SP210")
    local_sizes = "local_sizes: [config.num_attention_heads, num_key_value_heads]"
    assert found.hint == f"have each rank read its share: `{local_sizes}` in the rule for .layers.*.self_attn"
    blocks = (f".layers.*.self_attn: {{style: block, {local_sizes}}}", ".layers.*.mlp: block")
    plan = written(tmp_path, *AROUND, *blocks, *SECTIONED)
    assert findings(plan, model, sequence_parallel=sequence_parallel) == []
    case = Case("phi3", "tp=2", sequence_parallel, plan=str(plan), changes=CASE)
    assert pool.run(2, parity.compare, case, [Batch(), Batch(5, mask=True)], shared=True) == [[], []]


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
