"""C51: a plan for the bare model on one with low-rank adapters: resolved through PEFT, cut along with the base."""

from __future__ import annotations

import pytest

import adapter_jobs
import tiny_models
from pool import Pool
from shardplan import check_plan, compile_plan
from shardplan.mesh import parse_mesh

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "targets", "mesh"),
    [
        ("llama", ["q_proj", "o_proj"], "tp=2"),
        ("qwen3", ALL, "dp=2,tp=2"),
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj"], "tp=2"),
    ],
)
def test_adapters_are_cut_along(pool: Pool, name: str, targets: list[str], mesh: str, sequence_parallel: bool) -> None:
    for faults in pool.run(parse_mesh(mesh).size, adapter_jobs.compared, name, targets, mesh, sequence_parallel):
        assert faults == []


def test_names_are_those_of_the_bare_model() -> None:
    model = adapter_jobs.adapted("llama", ["q_proj", "o_proj"])
    compiled = compile_plan("llama", model, "tp=2")
    placements = {p.fqn: str(p.placement) for module in compiled.modules for p in module.parameters}
    attention = "model.layers.0.self_attn."
    assert placements[f"{attention}q_proj.weight"] == "shard(0)"
    assert placements[f"{attention}q_proj.lora_A.default.weight"] == "replicate"
    assert placements[f"{attention}q_proj.lora_B.default.weight"] == "shard(0)"
    assert placements[f"{attention}o_proj.lora_A.default.weight"] == "shard(1)"
    assert placements[f"{attention}o_proj.lora_B.default.weight"] == "replicate"


def test_adapters_of_shared_heads_are_refused() -> None:
    model = adapter_jobs.adapted("llama-1kv", ["k_proj"])
    assert {finding.code for finding in check_plan("llama", model, "tp=2")} == {"SP201"}
    assert tiny_models.plan_of("llama-1kv") == "llama"
