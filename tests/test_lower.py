"""A resolved plan to exact placements, collectives, gradients and units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardplan.api import compile_plan
from shardplan.compiled import CompiledModule, CompiledPlan
from shardplan.styles import Gradient
from tiny_models import build_meta

PLAN = Path(__file__).parents[1] / "plans" / "llama.yaml"


def lowered(name: str = "llama", plan: Any = PLAN, mesh: str = "dp=2,tp=2", **options: Any) -> CompiledPlan:
    return compile_plan(plan, build_meta(name), mesh, **options)


def module(compiled: CompiledPlan, fqn: str) -> CompiledModule:
    return next(module for module in compiled.modules if module.fqn == fqn)


def placements(compiled: CompiledPlan, fqn: str) -> dict[str, str]:
    return {parameter.name: str(parameter.placement) for parameter in module(compiled, fqn).parameters}


def overlay(folder: Path, text: str) -> list[Path]:
    path = folder / "overlay.yaml"
    path.write_text(f"format: 1\n{text}")
    return [PLAN, path]


def sums(compiled: CompiledPlan) -> set[str]:
    return {parameter.fqn for _, parameter in compiled.summed_parameters()}


def test_each_kind_of_module_is_split_on_its_own_dim() -> None:
    compiled = lowered("llama-biased")
    assert placements(compiled, "model.embed_tokens") == {"weight": "shard(0)"}
    assert placements(compiled, "model.layers.0.self_attn.q_proj") == {"weight": "shard(0)", "bias": "shard(0)"}
    assert placements(compiled, "model.layers.0.mlp.down_proj") == {"weight": "shard(1)", "bias": "replicate"}
    assert placements(compiled, "lm_head") == {"weight": "shard(0)"}
    assert placements(compiled, "model.norm") == {"weight": "replicate"}


@pytest.mark.parametrize(
    ("pattern", "dim"), [(".layers.*.mlp.{gate,up}_proj", 0), (".layers.*.{self_attn.o,mlp.down}_proj", 1)]
)
def test_a_linear_that_is_cut_by_number_is_cut_on_that_side(tmp_path: Path, pattern: str, dim: int) -> None:
    by_number = lowered("llama-biased", overlay(tmp_path, f"rules:\n  '{pattern}': {{style: shard, dim: {dim}}}\n"))
    cut = {m.fqn for m in by_number.modules if m.style == "shard"}
    assert len(cut) == 4
    for module, same in zip(by_number.modules, lowered("llama-biased").modules, strict=True):
        assert (module.style == same.style) == (module.fqn not in cut)
        as_written = {"style": same.style, "where": same.where, "layer": same.layer, "parameters": same.parameters}
        assert replace(module, **as_written) == same
        assert [replace(p, identity=0) for p in module.parameters] == [replace(p, identity=0) for p in same.parameters]


def test_only_the_bias_of_a_rowwise_linear_is_added_once() -> None:
    compiled = lowered("llama-biased")
    once = {p.fqn for m in compiled.modules for p in m.parameters if p.added_once}
    assert once == {f"model.layers.{i}.{name}.bias" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")}


@pytest.mark.parametrize(
    "style", ["null", "replicate", "replicated_with_grad_allreduce", "sequence_parallel", "added_once"]
)
def test_a_rule_of_its_own_for_that_bias_leaves_it_so(tmp_path: Path, style: str) -> None:
    """It would else be added on every rank."""
    compiled = lowered("llama-biased", overlay(tmp_path, f"rules:\n  '.layers.*.mlp.down_proj.bias': {style}\n"))
    bias = next(p for p in module(compiled, "model.layers.1.mlp.down_proj").parameters if p.name == "bias")
    assert (bias.added_once, bias.gradient) == (True, Gradient.COMPLETE)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_inside_a_block_only_the_block_has_edges(sequence_parallel: bool) -> None:
    compiled = lowered(sequence_parallel=sequence_parallel)
    with_edges = {m.fqn for m in compiled.modules if m.edges and m.block is not None}
    assert with_edges == set()
    block = module(compiled, "model.layers.0.mlp")
    assert [str(edge.conversion) for edge in block.edges] == ["stream -> replicate", "partial -> stream"]


def test_collectives_of_two_layers_are_five_and_five_or_ten_and_ten() -> None:
    def calls(compiled: CompiledPlan) -> list[int]:
        directions = [direction for _, direction, _ in compiled.collectives()]
        return [directions.count("forward"), directions.count("backward")]

    assert calls(lowered()) == [5, 5]
    assert calls(lowered(sequence_parallel=True)) == [10, 10]


# ---------------------------------------------------------------- the head


def test_the_head_and_the_gather_before_it_sum_one_gradient_once() -> None:
    compiled = lowered()
    norm, head = module(compiled, "model.norm"), module(compiled, "lm_head")
    assert norm.output is not None and head.input is not None  # noqa: PT018
    assert norm.output.cut is not None and head.input.cut is not None  # noqa: PT018
    assert (norm.output.cut.forward, norm.output.cut.backward) == ("all_gather", "reduce_scatter_mean")
    assert (head.input.cut.forward, head.input.cut.backward) == ("identity", "multiply")
    assert head.input.whole is not None
    assert (norm.output.whole, head.input.whole.backward) == (None, "all_reduce")
    assert head.output is None, "the logits leave as a DTensor, not over an edge"


def test_a_whole_head_is_not_coupled(tmp_path: Path) -> None:
    compiled = lowered(plan=overlay(tmp_path, "rules:\n  lm_head: null\n"))
    norm = module(compiled, "model.norm")
    assert compiled.head is None
    assert norm.output is not None
    assert norm.output.cut is not None
    assert norm.output.cut.backward == "chunk"


@pytest.mark.parametrize(
    ("text", "gathered"),
    [
        ("logits: sharded\n", False),
        ("logits: gathered\n", True),
        ("rules:\n  lm_head: {style: colwise, output: shard(-1) -> replicate}\n", True),
        ("rules:\n  lm_head: colwise_gather_output\n", True),
    ],
)
def test_the_logits_are_what_the_plan_says(tmp_path: Path, text: str, gathered: bool) -> None:
    compiled = lowered(plan=overlay(tmp_path, text))
    head = compiled.head
    assert head is not None
    assert module(compiled, "lm_head").output is None
    assert (head.fqn, head.vocabulary, head.gathered) == ("lm_head", 256, gathered)


# ---------------------------------------------------------------- gradients


def test_norms_on_the_stream_are_summed_while_it_is_cut() -> None:
    norms = {f"model.layers.{i}.{n}_layernorm.weight" for i in range(2) for n in ("input", "post_attention")}
    assert sums(lowered(sequence_parallel=True)) == {*norms, "model.norm.weight"}
    assert sums(lowered(sequence_parallel=False)) == set()
    assert sums(lowered(sequence_parallel=True, mesh="dp=2,tp=1")) == set()


@pytest.mark.parametrize("style", ["replicated_with_grad_allreduce", "null", "replicate"])
def test_whatever_is_whole_inside_a_block_is_summed_in_both_modes(tmp_path: Path, style: str) -> None:
    from shardplan.references import build_meta_model

    path = tmp_path / "plan.yaml"
    path.write_text(f"format: 1\nextends: qwen2\nrules:\n  .layers.*.self_attn.{{q,k}}_norm: {style}\n")
    model = build_meta_model("qwen3-0.6b")
    for mode in (False, True):
        compiled = compile_plan(path, model, "tp=2", sequence_parallel=mode)
        summed = [
            p.gradient for _, p in compiled.summed_parameters() if p.fqn.endswith(("q_norm.weight", "k_norm.weight"))
        ]
        assert summed == [Gradient.PARTIAL] * 2 * 28


def test_sums_are_one_for_each_unit_that_has_some() -> None:
    assert lowered(sequence_parallel=True).coalesced_sums() == {"", "model.layers.0", "model.layers.1"}
    assert lowered(sequence_parallel=True, mesh="tp=2").coalesced_sums() == {""}
    assert lowered().coalesced_sums() == frozenset()


# ---------------------------------------------------------------- units


def test_inner_units_come_first_and_the_later_line_decides(tmp_path: Path) -> None:
    text = 'fsdp:\n  units: {.layers.*.mlp: {reshard: true}, ".layers.*": {reshard: 4}, .layers.1: {reshard: false}}\n'
    units = lowered(plan=overlay(tmp_path, text), mesh="dp=8,tp=2").units
    assert [(unit.fqn, unit.reshard) for unit in units] == [
        ("model.layers.0.mlp", True), ("model.layers.1.mlp", True), ("model.layers.0", 4), ("model.layers.1", False),
    ]  # fmt: skip


def test_every_parameter_lies_in_its_innermost_unit(tmp_path: Path) -> None:
    compiled = lowered(plan=overlay(tmp_path, "fsdp:\n  units: {.layers.*.mlp: {}}\n"))
    assert compiled.unit_around("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp"
    assert compiled.unit_around("model.layers.0.self_attn.q_proj.weight") == "model.layers.0"
    assert compiled.unit_around("model.norm.weight") == ""


# ---------------------------------------------------------------- the stream


def test_where_the_stream_runs() -> None:
    compiled = lowered()
    assert (compiled.decoder, compiled.gather) == ("model", "model.norm")


def test_sequence_parallelism_needs_a_tp_axis() -> None:
    assert lowered(sequence_parallel=True).sequence_parallel
    assert not lowered(sequence_parallel=True, mesh="dp=2").sequence_parallel


def test_tied_parameters_count_once() -> None:
    assert len(lowered("llama-tied").parameters) == len(lowered("llama").parameters) - 1
