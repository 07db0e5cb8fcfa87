"""The summary of a compiled plan: bytes to the byte, calls, and what the text shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor.parallel import ParallelStyle

from shardplan.check import check
from shardplan.checks.target import Target, size
from shardplan.coverage import Treatment
from shardplan.diagnostics import errors
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
    assert not errors(check(target))
    compiled = lower(resolved, target.mesh, sequence_parallel=sequence_parallel)
    return make_report(target, compiled), compiled


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


def test_coverage_accounts_for_every_parameter(tmp_path: Path) -> None:
    plan = tmp_path / "overlay.yaml"
    plan.write_text("format: 1\nrules:\n  .layers.0.mlp.{gate,up,down}_proj: null\n  .layers.0.mlp: null\n")
    summary = report(plan=[PLAN, plan])
    sharded, purpose, omitted, native = summary.coverage.treatments
    mlp, norms = 3 * HIDDEN * INNER, 5 * HIDDEN
    assert (purpose.parameters, purpose.elements, purpose.nbytes) == (3 + 5, mlp + norms, 4 * (mlp + norms))
    assert (sharded.parameters, sharded.elements) == (4 + 7 + 2, summary.parameters - mlp - norms)
    assert (omitted.parameters, native.parameters) == (0, 0)
    assert sharded.nbytes_percent + purpose.nbytes_percent == pytest.approx(100, abs=1e-3)
    assert purpose.nbytes_percent == pytest.approx(100 * (mlp + norms) / summary.parameters, abs=1e-4)
    on_purpose = {s.style: s.parameters for s in summary.coverage.styles if s.treatment == purpose.treatment}
    assert on_purpose == {"null": 3, "sequence_parallel": 5}


def test_what_a_dict_plan_does_not_name_is_replicated_by_omission() -> None:
    model = take_inventory(build_meta("llama"))
    plan = {"model.layers.*.mlp.{gate,up}_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    target = Target(resolve(read_plan(plan), model), parse_mesh("tp=2"), False)
    assert errors(check(target)) == ()
    summary = make_report(target, lower(target.resolved, target.mesh, sequence_parallel=False))
    sharded, purpose, omitted, native = summary.coverage.treatments
    assert [share.parameters for share in (sharded, purpose, omitted, native)] == [6, 0, 15, 0]
    assert omitted.elements == summary.parameters - 6 * HIDDEN * INNER
    assert "replicated by omission: 15 parameters, " in report_text(summary)


def test_a_style_applied_as_it_stands_is_counted_apart() -> None:
    class Own(ParallelStyle):
        def _apply(self, module: Any, device_mesh: Any) -> Any:
            raise AssertionError("nothing is applied here")

    model = take_inventory(build_meta("llama"))
    target = Target(resolve(read_plan({"**": None, "lm_head": Own()}), model), parse_mesh("tp=2"), False)
    summary = make_report(target, lower(target.resolved, target.mesh, sequence_parallel=False))
    assert [share.parameters for share in summary.coverage.treatments] == [0, 20, 0, 1]
    assert [s.style for s in summary.coverage.styles if s.treatment == Treatment.NATIVE.value] == ["Own"]


def test_a_percentage_is_only_whole_where_the_share_is() -> None:
    lines = report_text(report(mesh="dp=4,tp=2")).splitlines()
    assert "replicated by omission: none" in lines
    (sharded,) = [line for line in lines if line.startswith("sharded: ")]
    summary = report()
    share = 100 - 100 * 5 * HIDDEN / summary.parameters
    amount = size(summary.nbytes.whole - summary.replicated_nbytes)
    assert sharded == f"sharded: 16 parameters, {amount}: {share:.2f} % of all elements, {share:.2f} % of all bytes"


def test_the_degrees_stand_at_the_end() -> None:
    lines = report_text(report(mesh="dp=12,tp=2")).splitlines()
    at = lines.index("tp degrees: 1, 2, 4, 8 (of 24 ranks)")
    assert lines[at + 1].startswith(
        "  not 3, 6, 12, 24: SP201: tp=3 does not divide the heads of model.layers.*.self_attn: "
    )


def test_tied_parameters_count_once_and_are_named() -> None:
    tied, untied = report(tie_word_embeddings=True), report()
    assert untied.parameters - tied.parameters == HIDDEN * WORDS
    assert tied.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "tied: model.embed_tokens.weight and lm_head.weight are one parameter\n" in report_text(tied)


def test_a_tied_parameter_is_covered_by_the_rule_of_its_first_name() -> None:
    tied = report(tie_word_embeddings=True).coverage.styles
    assert {s.style: s.parameters for s in tied if s.treatment == "sharded"} == {
        "embedding_rowwise": 1, "colwise": 10, "rowwise": 4,
    }  # fmt: skip


def test_a_rule_over_both_ends_of_a_tied_pair_counts_it_once(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text('format: 1\nfallback: none\nrules:\n  "**": null\n')
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
