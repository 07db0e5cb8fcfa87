"""The summary of a compiled plan: bytes to the byte, calls, and what the text shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.inventory import take_inventory
from shardplan.lower import lower
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.report import Report, as_dict, make_report
from shardplan.resolve import resolve
from shardplan.tables import report_text
from tiny_models import SIZES, build_meta

PLAN = Path(__file__).parents[1] / "plans" / "llama.yaml"
HIDDEN, INNER, WORDS = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]


def both(
    plan: Any = PLAN, mesh: str = "dp=2,tp=4", sequence_parallel: bool = False, **sizes: Any
) -> tuple[Report, Any]:
    resolved = resolve(read_plan(plan), take_inventory(build_meta("llama", **sizes)))
    target = Target(resolved, parse_mesh(mesh), sequence_parallel)
    assert check(target) == ()
    compiled = lower(resolved, target.mesh, sequence_parallel=sequence_parallel)
    return make_report(resolved, compiled), compiled


def report(**options: Any) -> Report:
    return both(**options)[0]


def row(of: Report, pattern: str) -> Any:
    return next(entry for entry in of.rules if entry.pattern == pattern)


def test_bytes_of_a_rule_are_those_of_the_fullest_rank() -> None:
    up = row(report(), "model.layers.*.mlp.up_proj").nbytes
    assert (up.whole, up.tp_rank, up.rank) == tuple(2 * 4 * HIDDEN * rows for rows in (INNER, INNER // 4, INNER // 8))
    down = row(report(), "model.layers.*.mlp.down_proj").nbytes
    assert (down.whole, down.tp_rank, down.rank) == (up.whole, up.tp_rank, up.rank)
    norm = row(report(), "model.norm").nbytes
    assert (norm.whole, norm.tp_rank, norm.rank) == (4 * HIDDEN, 4 * HIDDEN, 2 * HIDDEN)


def test_an_uneven_vocabulary_counts_the_rank_with_more() -> None:
    embedding = row(report(vocab_size=33, mesh="dp=2,tp=2"), "model.embed_tokens").nbytes
    assert (embedding.whole, embedding.tp_rank, embedding.rank) == tuple(4 * HIDDEN * rows for rows in (33, 17, 9))


def test_without_a_dp_axis_a_tp_rank_is_a_rank() -> None:
    summary = report(mesh="tp=4").nbytes
    assert summary.rank == summary.tp_rank < summary.whole


def test_the_whole_is_the_model() -> None:
    model = build_meta("llama")
    summary = report()
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert summary.nbytes.whole == sum(entry.nbytes.whole for entry in summary.rules) == 4 * summary.parameters
    assert summary.replicated_nbytes == 4 * HIDDEN * 5 == sum(entry.replicated_nbytes for entry in summary.rules)


def test_tied_parameters_count_once_and_are_named() -> None:
    tied, untied = report(tie_word_embeddings=True), report()
    assert untied.parameters - tied.parameters == HIDDEN * WORDS
    assert tied.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "tied: model.embed_tokens.weight and lm_head.weight are one parameter\n" in report_text(tied)


def test_a_rule_over_both_ends_of_a_tied_pair_counts_it_once(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text('format: 1\nrules:\n  "**": null\n')
    tied = report(plan=plan, tie_word_embeddings=True)
    assert [entry.nbytes.whole for entry in tied.rules] == [4 * tied.parameters]


def test_calls_are_counted_by_kind_of_module() -> None:
    calls = {(entry.module, entry.direction, entry.name): entry.calls for entry in report().collectives}
    assert calls["model.layers.*.mlp", "forward", "all_reduce"] == 2
    assert sum(number for (_, direction, _), number in calls.items() if direction == "forward") == 5
    assert (report().sums, report(sequence_parallel=True).sums) == (0, 3)


def test_a_rule_that_lost_everything_shows_no_bytes(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("format: 1\nrules:\n  .layers.*.mlp.up_proj: colwise\n")
    rows = [entry for entry in report(plan=[PLAN, overlay]).rules if entry.pattern == "model.layers.*.mlp.up_proj"]
    assert [(entry.layer, entry.matched, entry.parameters) for entry in rows] == [("[shipped]", 2, 0), ("[user]", 2, 2)]


def test_every_rule_is_shown_with_its_place_and_layer() -> None:
    lines = report_text(report()).splitlines()
    for entry in report().rules:
        (line,) = [line for line in lines if line.startswith(f"{entry.pattern} ") and str(entry.where) in line]
        assert line.endswith(f"{entry.where} [shipped]")
        assert f" {entry.matched} " in line


def test_the_text_is_plain() -> None:
    text = report_text(report())
    assert text.isascii()
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "object at 0x" not in text


def test_a_narrow_terminal_folds_but_loses_nothing() -> None:
    narrow = report_text(report(), width=100)
    table = narrow.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_data_is_json_and_complete(sequence_parallel: bool) -> None:
    summary, compiled = both(sequence_parallel=sequence_parallel)
    data = json.loads(json.dumps(as_dict(summary, compiled)))
    assert len(data["compiled"]["parameters"]) == 2 * 9 + 3
    edge = next(entry for entry in data["compiled"]["edges"] if entry["module"] == "model.layers.0.mlp")
    collective = {"forward": "all_gather", "backward": "reduce_scatter"}
    if not sequence_parallel:
        collective = {"forward": "identity", "backward": "all_reduce"}
    assert edge == {
        "module": "model.layers.0.mlp", "side": "input", "conversion": "stream -> replicate", "collective": collective,
    }  # fmt: skip
    assert data["compiled"]["fsdp"] == [{"fqn": f"model.layers.{i}", "reshard": None} for i in range(2)]
