"""transformers' own plan as the lowest layer: completed to what we ship, printed with its origin, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

import tiny_models
from shardplan import PlanError, check_plan, compile_plan, get_hf_tp_plan
from shardplan.diagnostics import Location, Severity
from shardplan.facts import in_situation
from shardplan.hf.known import KNOWN_WRONG, Wrong
from shardplan.hf.plan import hf_plan
from shardplan.hf.styles import HF_STYLES
from shardplan.inventory import take_inventory
from shardplan.merge import HF
from shardplan.plan import Plan


def from_hf(model: nn.Module, mesh: str, sequence_parallel: bool, rules: Mapping[str, Any] | None = None) -> Any:
    layers: list[Any] = [Plan(HF, Location(HF), over_hf=True), *([rules] if rules else [])]
    return compile_plan(layers, model, mesh, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma3"])
def test_it_comes_to_the_plan_that_we_ship(name: str, sequence_parallel: bool) -> None:
    """Placements, gradients, collectives, units: all but the rules that say so."""
    model = tiny_models.build_meta(name)
    shipped = compile_plan(tiny_models.plan_of(name), model, "dp=2,tp=2", sequence_parallel=sequence_parallel)
    derived = from_hf(model, "dp=2,tp=2", sequence_parallel)
    assert set(in_situation(derived)) ^ set(in_situation(shipped)) == set()


def test_every_style_of_transformers_is_in_the_table() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    of_expert_parallelism = {"ep_dispatch_experts", "grouped_gemm"}
    assert set(ALL_PARALLEL_STYLES.keys()) - set(HF_STYLES) <= of_expert_parallelism


def test_an_unknown_style_is_named_and_the_rest_is_kept() -> None:
    model = tiny_models.build_meta("llama")
    model.tp_plan["model.layers.*.mlp.up_proj"] = "colwize"
    with pytest.raises(PlanError) as error:
        get_hf_tp_plan(model)
    (finding,) = error.value.diagnostics
    assert finding.code == "SP101"
    assert "LlamaForCausalLM.tp_plan[model.layers.*.mlp.up_proj] of transformers 5." in finding.message
    assert finding.hint == "did you mean 'colwise'?"
    codes = {found.code for found in check_plan([Plan(HF, Location(HF), over_hf=True)], model, "tp=2")}
    assert "SP101" in codes
    styles = {str(rule.pattern): rule.style for rule in hf_plan(take_inventory(model)).rules}
    assert styles["model.layers.*.mlp.up_proj"] == "colwize"
    assert styles["model.layers.*.mlp.gate_proj"] == "colwise"


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="transformers has no tp_plan for Linear"):
        get_hf_tp_plan(nn.Linear(2, 2))


def test_a_users_rule_wins_over_transformers() -> None:
    model = tiny_models.build_meta("llama")
    compiled = from_hf(model, "tp=2", False, {"model.layers.0.mlp": "replicate"})
    placements = {p.fqn: str(p.placement) for module in compiled.modules for p in module.parameters}
    assert placements["model.layers.0.mlp.up_proj.weight"] == "replicate"
    assert placements["model.layers.1.mlp.up_proj.weight"] == "shard(0)"


def test_keys_that_match_nothing_are_one_note() -> None:
    model = tiny_models.build_meta("llama")
    model.tp_plan.update({"model.layers.*.mlp.experts": "moe_tp_experts", "model.layers.*.mlp.router": "replicate"})
    (finding,) = check_plan([Plan(HF, Location(HF), over_hf=True)], model, "tp=2")
    assert (finding.code, finding.severity) == ("SP102", Severity.NOTE)
    assert finding.message == (
        "2 keys of transformers' own plan for LlamaForCausalLM match nothing in it: model.layers.*.mlp.experts and "
        "model.layers.*.mlp.router"
    )


@pytest.mark.parametrize(("sequence_parallel", "refused"), [(False, False), (True, True)])
def test_what_is_known_to_be_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool, refused: bool
) -> None:
    monkeypatch.setitem(KNOWN_WRONG, "LlamaForCausalLM", Wrong("put here", on_cut_stream_alone=True))
    model = tiny_models.build_meta("llama")
    plan = Plan(HF, Location(HF), over_hf=True)
    messages = [f.message for f in check_plan([plan], model, "tp=2", sequence_parallel=sequence_parallel)]
    said = "transformers' own plan for LlamaForCausalLM, completed, is wrong under sequence parallelism: put here"
    assert messages == ([said] if refused else [])
    assert check_plan("llama", model, "tp=2", sequence_parallel=True) == ()
