"""The dry run: what a step of the real-size model sends, what raises in it, and that nothing is left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import tiny_models
from golden import ROOT, TINY
from shardplan import _compat
from shardplan.checks.target import Target
from shardplan.cli import command
from shardplan.diagnostics import PlanError, Severity
from shardplan.dry_run.calls import Call, Purpose
from shardplan.dry_run.compare import listed, ran_over_tp
from shardplan.dry_run.ranks import fake_ranks
from shardplan.dry_run.report import rows, totals
from shardplan.dry_run.run import DryRun, dry_run
from shardplan.dry_run.running import LOSS
from shardplan.from_python import Options, with_options
from shardplan.inventory import take_inventory
from shardplan.lower import lower
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.references import build_meta_model
from shardplan.resolve import resolve
from test_budgets import measured
from test_communication import TP, sp

pytestmark = pytest.mark.processes  # not quick

LENGTH = 128  # as many positions as the tiny models have
FLOAT = 4  # bytes
HIDDEN = 64


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert not dist.is_initialized()


def target(
    model: nn.Module, mesh: str = "tp=2", plan: Any = "llama", *, sequence_parallel: bool = False, **options: Any
) -> Target:
    read = with_options(read_plan([plan] if isinstance(plan, str) else plan), Options(**options))
    return Target(resolve(read, take_inventory(model)), parse_mesh(mesh), sequence_parallel)


def ran(name: str = "llama", mesh: str = "tp=2", **options: Any) -> DryRun:
    model = tiny_models.build_meta(name)
    return dry_run(target(model, mesh, options.pop("plan", tiny_models.plan_of(name)), **options), model)


def over_tp(calls: tuple[Call, ...]) -> dict[str, dict[str, int]]:
    counts = {"forward": Counter[str](), "backward": Counter[str]()}
    for call in calls:
        if call.purpose in (Purpose.EDGE, Purpose.SUM):
            counts[call.direction][call.name] += 1
    return {direction: dict(names) for direction, names in counts.items()}


def at(calls: tuple[Call, ...], module: str) -> dict[str, list[tuple[str, int]]]:
    """Direction -> what runs at ``module``, in order, and its bytes."""
    found: dict[str, list[tuple[str, int]]] = {}
    for call in calls:
        if call.module == module:
            found.setdefault(call.direction, []).append((call.name, call.nbytes))
    return found


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize(("mesh", "sums"), [("tp=2", 1), ("dp=2,tp=2", 3)])
def test_two_layers_of_llama_keep_the_communication_contract(mesh: str, sums: int) -> None:
    assert over_tp(ran(mesh=mesh).calls) == TP
    assert over_tp(ran(mesh=mesh, sequence_parallel=True).calls) == sp(sums)


IN_SHORT = ("llama-tied", "qwen3", "gemma3-vision")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", IN_SHORT)
def test_each_module_sends_what_the_compiled_plan_says(name: str, sequence_parallel: bool) -> None:
    check_against_plan(name, "dp=1,tp=2", sequence_parallel=sequence_parallel)


@pytest.mark.processes  # too long for `make check`
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, "dp=2,tp=2") for name in tiny_models.MODELS),
        *((name, mesh) for name in IN_SHORT for mesh in ("tp=4", "dp_replicate=2,dp=2,tp=2")),
    ],
)
def test_so_it_is_for_all_families_and_meshes(name: str, mesh: str) -> None:
    for sequence_parallel in (False, True):
        check_against_plan(name, mesh, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=1"])
def test_without_tp_nothing_is_sent_over_it(mesh: str) -> None:
    result = ran(mesh=mesh)
    assert result.findings == ()
    assert {call.purpose for call in result.calls} == {Purpose.FSDP}


def check_against_plan(name: str, mesh: str, *, sequence_parallel: bool) -> None:
    model = tiny_models.build_meta(name)
    of = target(model, mesh, tiny_models.plan_of(name), sequence_parallel=sequence_parallel)
    compiled = lower(of.resolved, of.mesh, sequence_parallel=sequence_parallel)
    result = dry_run(of, model)
    assert result.findings == ()
    assert ran_over_tp(result.calls, compiled) == listed(compiled) != Counter()


def test_bytes_are_those_computed_by_hand() -> None:
    calls = ran(mesh="dp=2,tp=2").calls
    stream = LENGTH * HIDDEN * FLOAT
    for block in ("model.layers.0.self_attn", "model.layers.1.mlp"):
        assert at(calls, block) == {"forward": [("all_reduce", stream)], "backward": [("all_reduce", stream)]}
    attention, mlp, norms = HIDDEN * (64 + 32 + 32 + 64), 3 * HIDDEN * 128, 2 * HIDDEN
    layer = ((attention + mlp) // 2 + norms) * FLOAT  # of a tp rank
    assert at(calls, "model.layers.0") == {
        "forward": [("all_gather", layer // 2)],
        "backward": [("all_gather", layer // 2), ("reduce_scatter", layer)],
    }
    assert at(calls, LOSS) == {"forward": [("all_reduce", LENGTH * FLOAT), ("all_reduce", 3 * LENGTH * FLOAT)]}


def test_bytes_of_a_cut_stream() -> None:
    calls = ran(mesh="dp=2,tp=2", sequence_parallel=True).calls
    stream = LENGTH * HIDDEN * FLOAT
    edges = [("all_gather", stream // 2), ("reduce_scatter", stream)]
    assert at(calls, "model.layers.1.mlp") == {"forward": edges, "backward": edges}
    # The layer's norms; dp has cut their gradients when tp adds them up.
    assert ("all_reduce", 2 * HIDDEN * FLOAT // 2) in at(calls, "model.layers.1")["backward"]


def test_rows_and_totals_add_up() -> None:
    calls = ran(mesh="dp=2,tp=2", sequence_parallel=True).calls
    table = rows(calls)
    assert sum(row.calls for row in table) == len(calls)
    assert sum(row.nbytes for row in table) == sum(nbytes for _, nbytes in totals(calls).values())
    blocks = [row for row in table if row.module == "model.layers.*.mlp"]
    assert [(row.direction, row.modules, row.calls) for row in blocks] == [
        ("forward", 2, 2),
        ("forward", 2, 2),
        ("backward", 2, 2),
        ("backward", 2, 2),
    ]
    assert {row.module for row in table if row.modules == 1 and "layers" in row.module} == {"model.layers.0"}


def test_recomputation_is_counted_apart() -> None:
    result = ran(mesh="dp=2,tp=2", sequence_parallel=True, recompute=[".layers.*"])
    assert result.findings == ()
    again = Counter(call.name for call in result.calls if call.direction == "recomputation")
    assert again == {"all_gather": 4, "reduce_scatter": 2}  # the backward needs nothing behind the last edge


def test_gathered_logits_are_part_of_the_plan() -> None:
    result = ran(plan=["llama", {"lm_head": {"style": "colwise", "output": "shard(-1) -> replicate"}}])
    assert result.findings == ()
    assert at(result.calls, "lm_head")["forward"] == [("all_gather", LENGTH * tiny_models.VOCABULARY // 2 * FLOAT)]


def test_a_frozen_part_is_not_missed_in_the_backward() -> None:
    model = tiny_models.build_meta("llama")
    model.get_submodule("model.embed_tokens").requires_grad_(False)
    result = dry_run(target(model, sequence_parallel=True), model)
    assert result.findings == ()
    assert at(result.calls, "model.layers.0") == {}  # its input's gradient has nowhere to go


def test_lengths_are_what_the_model_and_tp_allow() -> None:
    assert ran(mesh="tp=2").length == LENGTH
    model = tiny_models.build_meta("llama", max_position_embeddings=99)
    assert dry_run(target(model, "tp=4"), model).length == 96


class Own(nn.Module):
    """A model of nobody's library: ids by position, logits as they are, and a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(32, 8), nn.Linear(8, 16), nn.Linear(16, 32)
        self.table = torch.ones(8)

    def forward(self, tokens: Any) -> Any:
        return self.down(self.up(self.embed(tokens) * self.table).relu())


def test_a_model_of_ones_own_needs_no_labels() -> None:
    with torch.device("meta"):
        model = Own()
    plan = {"embed": "replicate", "up": "colwise", "down": "rowwise"}
    result = dry_run(target(model, "tp=2", [plan]), model, length=16)
    assert result.findings == ()
    assert at(result.calls, "down") == {"forward": [("all_reduce", 16 * 32 * FLOAT)]}
    assert at(result.calls, "up") == {"backward": [("all_reduce", 16 * 8 * FLOAT)]}


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_bytes_follow_the_precision(dtype: str, size: int) -> None:
    result = ran(mesh="dp=2,tp=2", mixed_precision={"param": dtype, "reduce": "float32"}, cpu_offload=True)
    assert result.findings == ()
    assert at(result.calls, "model.layers.1.mlp")["forward"] == [("all_reduce", LENGTH * HIDDEN * size)]


# ---------------------------------------------------------------- what raises


class Backward(nn.Module):
    """Raises in the backward alone."""

    def forward(self, x: Any) -> Any:
        x.register_hook(self.refuse)
        return nn.functional.silu(x)

    def refuse(self, gradient: Any) -> None:
        raise ValueError(f"no gradient of {gradient.shape[-1]}\nand a second line")


def test_a_forward_that_raises_is_named_with_its_rule() -> None:
    model = build_meta_model("broken_models:llama_of_fixed_width")
    (finding,) = dry_run(target(model, "dp=2,tp=2"), model).findings
    assert (finding.code, finding.severity, finding.subject) == (
        "SP401",
        Severity.ERROR,
        "model.layers.0.mlp.down_proj",
    )
    assert "model.layers.0.mlp.down_proj (FixedWidth) raises in the forward: RuntimeError: shape" in finding.message
    assert finding.where is not None
    rule = (ROOT / "plans" / "llama.yaml").read_text().splitlines()[finding.where.line - 1]
    assert "mlp.down" in rule


def test_a_backward_that_raises_is_named_with_the_rule_around() -> None:
    model: Any = build_meta_model("broken_models:llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = Backward()
    (finding,) = dry_run(target(model, "dp=2,tp=2"), model).findings
    # The last layer's backward comes first; it has 24 of 48 features. No rule speaks of the activation itself.
    assert "model.layers.1.mlp" in finding.message
    assert finding.message.endswith("raises in the backward: ValueError: no gradient of 24")
    assert finding.where is not None
    rule = (ROOT / "plans" / "llama.yaml").read_text().splitlines()[finding.where.line - 1]
    assert "mlp" in rule


def test_a_module_that_runs_twice_sends_otherwise_than_the_plan_says() -> None:
    model = build_meta_model("broken_models:llama_with_mlps_twice")
    result = dry_run(target(model), model)
    assert [(finding.code, finding.subject) for finding in result.findings] == [("SP402", "model.layers.*.mlp")] * 2
    assert "all_reduce for model.layers.*.mlp in the forward 4 times; the compiled plan says 2" in str(
        result.findings[0]
    )


def test_a_forward_that_asks_for_values_could_not_be_run() -> None:
    model = build_meta_model("broken_models:llama_that_clips")
    result = dry_run(target(model), model)
    assert [finding.code for finding in result.findings] == ["SP904"]
    assert result.calls == ()


def test_another_process_group_is_left_alone() -> None:
    model = tiny_models.build_meta("llama")
    dist.init_process_group("fake", store=_compat.fake_store(), rank=0, world_size=3)
    try:
        with pytest.raises(PlanError, match="SP904"):
            dry_run(target(model), model)
        assert dist.get_world_size() == 3
    finally:
        dist.destroy_process_group()


def test_the_pretended_ranks_go_with_an_exception() -> None:
    def fail() -> None:
        with fake_ranks(parse_mesh("dp=1024,tp=8")) as mesh:
            assert mesh.size() == dist.get_world_size() == 8192
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not dist.is_initialized()


# ---------------------------------------------------------------- the command


def run(*args: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    return CliRunner().invoke(command, [*args], catch_exceptions=False)


def test_it_prints_a_table_for_each_situation(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--check", "--dry-run", "plans/llama.yaml", *TINY, monkeypatch=monkeypatch)
    assert result.exit_code == 0
    heads = [line for line in result.stdout.splitlines() if line.startswith("plan ")]
    assert [head.partition(": one step of 2048 tokens")[0] for head in heads] == [
        f"plan plans/llama.yaml on broken_models:llama dp=2,tp=2 {mode}" for mode in ("TP", "SP")
    ]
    assert result.stdout.count("in all: tp ") == 2


def test_it_gives_the_same_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--dry-run", "plans/llama.yaml", *TINY, "--format", "json", monkeypatch=monkeypatch)
    said = json.loads(result.stdout)
    assert said["findings"] == []
    (tp, _) = said["dry_runs"]
    assert (tp["on"], tp["length"]) == ("broken_models:llama dp=2,tp=2 TP", 2048)
    assert tp["totals"]["tp"] == {"calls": 10, "nbytes": 10 * 2048 * 32 * FLOAT}
    mlp = {"purpose": "tp", "module": "model.layers.*.mlp", "direction": "forward", "name": "all_reduce"}
    expected = {**mlp, "modules": 2, "calls": 2, "nbytes_per_call": 2048 * 32 * FLOAT, "nbytes": 2 * 2048 * 32 * FLOAT}
    assert expected in tp["collectives"]
    linears = 2 * 2048 * (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 32)  # of two layers and the head
    assert tp["forward"]["flops"] >= linears
    assert tp["forward"] == {
        "flops": tp["forward"]["flops"],
        "flops_per_rank": tp["forward"]["flops"] // 2,
        "sharded_percent": 100.0,
    }


def test_where_the_checks_find_errors_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(
        "--dry-run", "llama", "--model", "broken_models:llama_of_5_words", "--mesh", "tp=4", monkeypatch=monkeypatch
    )
    assert result.exit_code == 1
    assert "SP202" in result.stdout
    assert "in all:" not in result.stdout


# ---------------------------------------------------------------- what it may cost

IMPORTS = "import torch, transformers; from transformers import LlamaForCausalLM"


@pytest.mark.processes  # a process of its own, and seconds of it
def test_a_real_size_model_in_seconds() -> None:
    spent = measured(
        "--dry-run", "llama", "--model", "llama-3.1-8b", "--mesh", "dp=1024,tp=8", "--sequence-parallel", before=IMPORTS
    )
    assert spent["code"] == 0
    assert spent["check"] < 20, spent  # about 5
    assert spent["peak"] < 1, spent
