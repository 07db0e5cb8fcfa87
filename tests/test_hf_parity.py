"""transformers' own plans, completed, on models that need more than blocks around linears: exact, and for a reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import hf_models
from pool import Pool
from shardplan import compile_plan
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Location
from shardplan.inventory import take_inventory
from shardplan.merge import HF
from shardplan.mesh import parse_mesh
from shardplan.plan import Plan
from shardplan.resolve import resolve
from shardplan.styles import Gradient
from shardplan.verify.compare import Proof, compare

OURS = Plan(HF, Location(HF), over_hf=True)


def compiled(name: str, *, sequence_parallel: bool = False) -> CompiledPlan:
    plan: Any = [OURS]
    return compile_plan(plan, hf_models.build_meta(name), "tp=2", sequence_parallel=sequence_parallel)


@pytest.mark.processes
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_it_computes_what_the_unsharded_model_does(pool: Pool, name: str, sequence_parallel: bool) -> None:
    resolved = resolve(OURS, take_inventory(hf_models.build_meta(name)))
    build = partial(hf_models.build, name)
    proof = Proof(build, resolved.plan, resolved.styles, parse_mesh("dp=1,tp=2"), sequence_parallel)
    assert pool.run(2, compare, proof) == [[], []]


def test_experts_that_transformers_leaves_whole_are_cut_as_they_lie() -> None:
    """GPT-OSS: (experts, in, out), gate and up in turns: the last dim as it is; a bias behind the sum counts once."""
    experts = compiled("gpt-oss").by_fqn["model.layers.0.mlp.experts"]
    placed = {p.name: (str(p.placement), p.sections, p.added_once) for p in experts.parameters}
    assert placed == {
        "gate_up_proj": ("shard(2)", (), False),
        "gate_up_proj_bias": ("shard(1)", (), False),
        "down_proj": ("shard(1)", (), False),
        "down_proj_bias": ("replicate", (), True),
    }


def test_experts_that_lie_one_behind_the_other_are_cut_in_sections() -> None:
    experts = compiled("deepseek-v4").by_fqn["model.layers.0.mlp.experts"]
    placed = {p.name: (str(p.placement), [section.length for section in p.sections]) for p in experts.parameters}
    assert placed == {"gate_up_proj": ("shard(1)", [48, 48]), "down_proj": ("shard(2)", [])}


def test_tables_of_words_beside_the_embedding_are_cut_by_rows() -> None:
    (table,) = compiled("gemma4").by_fqn["model.embed_tokens_per_layer"].parameters
    assert str(table.placement) == "shard(0)"


def test_a_linear_out_of_the_streams_width_gathers_and_one_into_it_cuts() -> None:
    modules = compiled("gemma4", sequence_parallel=True).by_fqn
    out, back = (modules[f"model.layers.0.per_layer_{name}"] for name in ("input_gate", "projection"))
    assert [str(edge.conversion) for edge in out.edges] == ["stream -> replicate"]
    assert [str(edge.conversion) for edge in back.edges] == ["replicate -> stream"]


def test_hyper_connections_run_on_the_cut_stream() -> None:
    modules = compiled("deepseek-v4", sequence_parallel=True).by_fqn
    for name in ("layers.0.attn_hc", "layers.0.ffn_hc", "hc_head"):
        module = modules[f"model.{name}"]
        assert module.edges == ()
        assert {p.gradient for p in module.parameters} == {Gradient.STREAM}
