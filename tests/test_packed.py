"""What is said of sections, local sizes and shared KV heads; tests/test_cases.py has the sizes themselves."""

from __future__ import annotations

from typing import Any

import pytest

import broken_models
from golden import BROKEN
from shardplan import check_plan
from shardplan.diagnostics import Diagnostic, Location, Severity
from shardplan.merge import HF
from shardplan.plan import Plan
from shardplan.references import build_meta_model
from tiny_models import build_meta

GATE_UP, ATTENTION = ".layers.*.mlp.gate_up_proj", ".layers.*.self_attn"


STABLELM = str(BROKEN / "SP210.yaml")  # the plan for Llama, on StableLM


def findings(
    plan: str, model: Any, overrides: dict[str, Any] | None = None, mesh: str = "tp=2", **options: Any
) -> list[Diagnostic]:
    built = build_meta(model) if isinstance(model, str) else model
    return [f for f in check_plan(plan, built, mesh, overrides=overrides, **options) if f.code != "SP209"]


def sectioned(*sections: dict[str, str | int], style: str = "colwise") -> dict[str, Any]:
    return {"style": style, "sections": list(sections)}


@pytest.mark.parametrize(
    ("plan", "overrides", "message", "expected"),
    [
        (
            "phi3",
            {GATE_UP: sectioned({"gate": "intermediate_size"}, {"up": "hidden_size"})},
            "sections of model.layers.*.mlp.gate_up_proj: 128 + 64 is 192, but weight has 256",
            "sections that add up to 256",
        ),
        (
            "phi3",
            {GATE_UP: sectioned({"gate": "2 * ffn"}, {"up": 128})},
            "sections of model.layers.*.mlp.gate_up_proj: nobody knows 'ffn'",
            "the name of a whole number",
        ),
        (
            "phi3",
            {GATE_UP: sectioned({"half": 128}, {"half": 128})},
            "sections of model.layers.*.mlp.gate_up_proj: two are named half",
            "a name for each",
        ),
        (
            "phi3",
            {".layers.*.input_layernorm": sectioned({"left": 32}, {"right": 32}, style="sequence_parallel")},
            "sections of model.layers.*.input_layernorm: sequence_parallel cuts no parameter of it",
            "sections with a style that cuts: colwise or shard",
        ),
        (
            "gpt2",
            {"lm_head": {**sectioned({"known": 128}, {"rare": 128}), "output": "shard(-1)"}},
            "sections of lm_head: weight is tied to another parameter",
            "a packed parameter of its own",
        ),
        (
            "phi3",
            {ATTENTION: {"style": "block", "local_sizes": ["config.num_attention_heads", "kv_heads"]}},
            "model.layers.*.self_attn, a Phi3Attention, has no whole number kv_heads",
            "one of head_dim, layer_idx, num_key_value_groups or num_key_value_heads",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value in ("phi3", "gpt2") else "",
)
def test_sections_and_local_sizes_that_do_not_fit(
    plan: str, overrides: dict[str, Any], message: str, expected: str
) -> None:
    (found,) = findings(plan, plan, overrides)
    assert (found.code, found.severity) == ("SP214", Severity.ERROR)
    assert (found.message, found.expected) == (message, expected)


@pytest.mark.parametrize(
    "sizes", [["gate: 128", "up: 128"], ["gate: hidden_size + hidden_size", "up: 2 * hidden_size"]]
)
def test_sizes_may_be_spelled_in_any_way_that_comes_to_the_same(sizes: list[str]) -> None:
    sections = [dict([size.split(": ")]) for size in sizes]
    assert findings("phi3", "phi3", {GATE_UP: sectioned(*sections)}) == []


# ---------------------------------------------------------------- SP201: groups


@pytest.mark.parametrize(
    ("tp", "odd"),
    [(16, "n_groups=8"), (3, "num_heads=128, n_groups=8, intermediate_size=8192 and conv_dim=10240")],
)
def test_a_mixer_is_cut_by_group(tp: int, odd: str) -> None:
    model = build_meta_model("nemotron-h-8b")
    found = {finding.subject: finding for finding in findings("nemotron_h", model, mesh=f"tp={tp}") if
             "heads of" not in finding.message and finding.code == "SP201"}  # fmt: skip
    (mixer,) = found.values()
    assert mixer.message == f"tp={tp} does not divide {odd} of model.layers.*.mixer"
    assert mixer.expected == "a tp that divides all that is counted: 1, 2, 4 or 8"
    assert findings("nemotron_h", model, mesh="tp=8") == []


def offered(plan: str, model: Any, tp: int, overrides: dict[str, Any] | None = None) -> str:
    """The degrees that SP201 names where tp tears the heads of attention apart."""
    found = [finding for finding in findings(plan, model, overrides, mesh=f"tp={tp}") if finding.code == "SP201"]
    (torn,) = (finding for finding in found if "the heads of" in finding.message)
    return torn.expected


def test_degrees_for_the_heads_fit_the_other_mixers_too() -> None:
    model = build_meta_model("nemotron-3-nano-30b-a3b")
    assert offered("nemotron_h", model, 3) == (
        "a tp that divides the heads, and the KV heads or is a multiple of them: 1, 2, 4 or 8 "
        "(other sizes of the model rule out 16 and 32)"
    )
    assert {finding.code for finding in findings("nemotron_h", model, mesh="tp=8")} == {"SP215"}


@pytest.mark.parametrize("tp", [3, 4, 8])
def test_kv_heads_that_no_section_holds_alone_are_not_shared(tp: int) -> None:
    """What ranks would have to gather lies among the queries, or in one section with the values."""
    joined = sectioned({"q": "num_attention_heads * head_dim"}, {"kv": "2 * num_key_value_heads * head_dim"})
    rule = {"model.layers.*.self_attn.qkv_proj": joined}
    assert offered("phi3", build_meta("phi3"), tp, rule) == "a tp that divides the heads and the KV heads: 1 or 2"
    if tp != 4:
        assert offered("phi3", build_meta("phi3"), tp) == (
            "a tp that divides the heads, and the KV heads or is a multiple of them: 1, 2 or 4"
        )


# ---------------------------------------------------------------- SP210: silenced by local sizes


def test_attention_may_be_told_its_share() -> None:
    model = broken_models.stablelm()
    (found,) = findings(STABLELM, model)
    assert found.code == "SP210"
    assert found.hint.startswith("have each rank read its share: `local_sizes: [num_heads, num_key_value_heads]` in ")
    told = {ATTENTION: {"style": "block", "local_sizes": ["num_heads", "num_key_value_heads"]}}
    assert findings(STABLELM, model, told) == []
    half = {ATTENTION: {"style": "block", "local_sizes": ["num_heads"]}}
    (found,) = findings(STABLELM, model, half)
    assert "shapes its activations by self.num_key_value_heads, " in found.message
    assert "`local_sizes: [num_heads, num_key_value_heads]`" in found.hint


# ---------------------------------------------------------------- SP215


@pytest.mark.parametrize(
    ("plan", "model", "tp", "ranks", "attention", "projections"),
    [
        ("llama", "llama-2kv", 4, 2, "model.layers.*.self_attn", "k_proj and v_proj stay"),
        ("llama", "llama-1kv", 4, 4, "model.layers.*.self_attn", "k_proj and v_proj stay"),
        ("nemotron_h", "nemotron-h", 4, 2, "model.layers.*.mixer", "k_proj and v_proj stay"),
        ("phi3", "phi3", 4, 2, "model.layers.*.self_attn", "qkv_proj stays"),
    ],
)
def test_heads_that_ranks_share_are_a_note(
    plan: str, model: str, tp: int, ranks: int, attention: str, projections: str
) -> None:
    (found,) = findings(plan, model, mesh=f"tp={tp}")
    assert (found.code, found.severity, found.subject) == ("SP215", Severity.NOTE, attention)
    assert found.message == (
        f"KV heads replicated x{ranks} in {attention}, which has {tp // ranks} for tp={tp}; "
        f"{projections} cut over all ranks"
    )
    assert found.expected == f"at no cost: a tp up to {tp // ranks}"
    assert f"an all-gather of their outputs among {ranks} neighbours" in found.hint
    assert findings(plan, model, mesh=f"tp={tp // ranks}") == []


def test_attention_that_stays_whole_shares_nothing() -> None:
    whole = {ATTENTION: None, f"{ATTENTION}.*_proj": None}
    assert [f.code for f in findings("llama", "llama-1kv", whole, "tp=4")] in ([], ["SP211"])


@pytest.mark.parametrize(
    ("plan", "overrides", "message"),
    [
        (
            "phi3",
            {f"{ATTENTION}.qkv_proj": sectioned({"k": 32}, {"q": 64}, {"v": 32})},
            "sections of model.layers.*.self_attn.qkv_proj are 32, 64, 32, where block model.layers.*.self_attn takes "
            "it apart into 64, 32, 32",
        ),
        (
            "phi3",
            {GATE_UP: sectioned({"a": 1}, {"b": 1}, {"c": 1}, {"d": 1})},
            "sections of model.layers.*.mlp.gate_up_proj are 64, 64, 64, 64, where block model.layers.*.mlp takes it "
            "apart into 128, 128",
        ),
        (
            "llama",
            {".layers.*.self_attn.q_proj": sectioned({"a": 1}, {"b": 1})},
            "sections of model.layers.*.self_attn.q_proj are 32, 32, where block model.layers.*.self_attn takes it "
            "apart into 64",
        ),
        ("llama", {"lm_head": sectioned({"a": 1}, {"b": 1})}, "lm_head has sections, but a vocabulary is cut as one"),
        (
            "llama",
            {ATTENTION: {"style": "block", "local_sizes": ["head_dim"]}},
            "head_dim of model.layers.*.self_attn counts within one head, or between heads, and is the same on every "
            "rank",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value in ("phi3", "llama") else "",
)
def test_sections_that_nothing_takes_apart_so(plan: str, overrides: dict[str, Any], message: str) -> None:
    assert message in [found.message for found in findings(plan, plan, overrides) if found.code == "SP214"]


def test_gpt2_without_its_local_size_is_refused() -> None:
    messages = [found.message for found in findings("gpt2", "gpt2", {".h.*.attn": "block"}) if found.code == "SP210"]
    assert messages == [
        "transformer.h.*.attn, a GPT2Attention, shapes its activations by self.split_size, which counts what all 4 "
        "heads have"
    ]


@pytest.mark.parametrize(
    ("plan", "name", "dim"),
    [
        ("gpt2", ".h.*.attn.c_attn.weight", 1),
        ("phi3", ".layers.*.self_attn.qkv_proj.weight", 0),
        ("llama", ".layers.*.mlp.up_proj.weight", 0),
    ],
)
def test_a_parameter_of_a_linear_is_not_cut_by_number(plan: str, name: str, dim: int) -> None:
    """Its module's sections would be lost; where there are none it would be one of two that say the same."""
    (found,) = findings(plan, plan, {name: {"style": "shard", "dim": dim}})
    assert (found.code, found.hint) == ("SP105", "remove the parameter's name from the pattern")


def test_numbers_alone_are_shares() -> None:
    for sections in ([{"gate": 1}, {"up": 1}], [{"gate": 128}, {"up": 128}], [{"gate": 8192}, {"up": 8192}]):
        assert findings("phi3", "phi3", {GATE_UP: sectioned(*sections)}) == []


def test_a_projection_that_lies_head_by_head_is_cut_plainly() -> None:
    rules = {
        "gpt_neox.layers.*.attention": "block",
        "gpt_neox.layers.*.attention.query_key_value": "colwise",
        "gpt_neox.layers.*.attention.dense": "rowwise",
    }
    codes = {found.code for found in check_plan(rules, broken_models.gpt_neox(), "tp=2")}
    assert "SP105" not in codes


@pytest.mark.parametrize("style", [None, "replicated_with_grad_allreduce"])
def test_experts_that_stay_whole_in_a_block_are_refused(style: str | None) -> None:
    whole = {".layers.*.mixer.experts.{up,down}_proj": style}
    messages = [found.message for found in findings("nemotron_h", "nemotron-h", whole) if found.code == "SP203"]
    assert messages == [
        "model.layers.*.mixer.experts.up_proj and model.layers.*.mixer.experts.down_proj stay whole in block "
        "model.layers.*.mixer, which adds up over tp what each rank gives"
    ]


@pytest.mark.parametrize(("width", "rows"), [(36, {2: 72, 4: 36, 8: 4}), (48, {8: 24}), (64, {})])
def test_rows_of_experts_that_grouped_products_do_not_take(width: int, rows: dict[int, int]) -> None:
    """In fp32; the unsharded ones of 144, 192 and 256 bytes they do take."""
    for tp in (2, 4, 8):
        model = build_meta("nemotron-h", moe_intermediate_size=width, n_groups=8, num_attention_heads=8)
        found = [f for f in check_plan("nemotron_h", model, f"tp={tp}") if f.code == "SP202"]
        assert [f.severity for f in found] == [Severity.WARNING] * (tp in rows)
        assert all(f"experts.down_proj has rows of {rows[tp]} bytes over tp={tp}" in f.message for f in found)


def left_whole() -> Any:
    """A Llama of whose plan only the ends are there, and whose linears have names that nobody knows."""
    model: Any = build_meta("llama")
    model.tp_plan.clear()
    model.tp_plan.update({"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"})
    for layer in model.model.layers:
        for module, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            setattr(module, f"other_{name}", getattr(module, name))
            delattr(module, name)
    return model


def test_what_transformers_leaves_whole_is_a_warning() -> None:
    found = {
        finding.code: finding for finding in check_plan([Plan(HF, Location(HF), over_hf=True)], left_whole(), "tp=2")
    }
    assert found["SP211"].severity is Severity.WARNING
    assert "stay whole over tp: transformers' own plan does not say how to cut" in found["SP211"].message
