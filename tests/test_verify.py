"""``--verify``: right plans are proven, and what no check can see is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import broken_models
from golden import ROOT
from shardplan import PlanError, cli, verify_plan
from shardplan.mesh import parse_mesh
from shardplan.references import build_meta_model
from shardplan.verify import ranks as ranks_module
from shardplan.verify.prove import small_mesh
from shardplan.verify.ranks import LocalRanks, RanksFailedError

pytestmark = pytest.mark.processes
ON_POOL = pytest.mark.usefixtures("verify_on_pool")  # the others have processes of their own, as users have


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.command, ["--verify", *args])


def test_a_right_plan_is_proven_in_both_modes_and_what_was_shrunk_is_said() -> None:
    result = run("llama", "--model", "llama-3.2-1b", "--mesh", "dp=2,tp=4")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("computes what the unsharded model does") == 2
    assert "num_hidden_layers 16 -> 2" in result.stdout
    assert "num_key_value_heads 8 -> 4" in result.stdout


@ON_POOL
def test_more_processes_than_the_small_mesh_takes() -> None:
    result = run("llama", "--model", "broken_models:llama", "--mesh", "dp=2,tp=2", "--processes", "3")
    assert result.exit_code == 0, result.output


@ON_POOL
def test_a_plan_that_the_checks_refuse_is_not_run(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("format: 1\nextends: llama\nrules:\n  .layers.*.mlp.up_proj: null\n")
    result = run(str(plan), "--model", "broken_models:llama", "--mesh", "tp=2", "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["proofs"] == []


@ON_POOL
@pytest.mark.parametrize(
    ("build", "code", "subject"),
    [
        (broken_models.llama_across_features, "SP403", "model.layers.*.mlp"),
        (broken_models.llama_of_fixed_width, "SP401", "model.layers.*.mlp.down_proj"),
    ],
)
def test_what_no_check_sees_is_found_and_named(build: Any, code: str, subject: str) -> None:
    found = verify_plan("llama", build, "tp=2", sequence_parallel=False)
    assert [(finding.code, finding.subject) for finding in found] == [(code, subject)]
    assert found[0].where is not None
    assert found[0].where.file.endswith("llama.yaml")


@ON_POOL
def test_a_gradient_that_only_one_mode_gets_wrong() -> None:
    layers = ["llama", {".norm.first": "replicate"}]
    build = broken_models.llama_with_two_norms
    assert verify_plan(layers, build, "dp=1,tp=2", sequence_parallel=False) == ()
    (found,) = verify_plan(layers, build, "dp=1,tp=2", sequence_parallel=True)
    assert (found.code, found.subject) == ("SP404", "model.norm.first.weight")


@ON_POOL
def test_the_api_proves_a_meta_model_that_has_no_small_builder() -> None:
    assert verify_plan("qwen2", build_meta_model("qwen3-0.6b"), "dp=8,tp=8", sequence_parallel=True) == ()


def test_what_cannot_be_handed_to_processes_is_refused() -> None:
    with pytest.raises(PlanError, match="SP903: LlamaForCausalLM, its builder or a style cannot be handed"):
        verify_plan("llama", lambda: broken_models.llama(), "tp=2")


@pytest.mark.parametrize(
    ("mesh", "processes", "small"),
    [
        ("dp=64,tp=8", 2, "dp=1,tp=2"),
        ("dp=64,tp=8", 4, "dp=2,tp=2"),
        ("tp=8", 4, "tp=4"),
        ("dp=1,tp=8", 4, "dp=1,tp=4"),
        ("dp=8,tp=1", 2, "dp=2,tp=1"),
        ("dp_replicate=2,dp_shard=4,tp=2", 2, "dp_replicate=1,dp_shard=1,tp=2"),
    ],
)
def test_the_small_mesh(mesh: str, processes: int, small: str) -> None:
    assert str(small_mesh(parse_mesh(mesh), processes)) == small


# ---------------------------------------------------------------- the processes


def test_ranks_that_fail_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 0.5)
    with LocalRanks(2) as ranks:
        with pytest.raises(RanksFailedError, match="rank 1 raised ZeroDivisionError: on purpose"):
            ranks.run(one_fails_and_one_waits)
        assert ranks.run(own_rank) == [0, 1]


def own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def one_fails_and_one_waits() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    dist.all_reduce(torch.ones(1))
