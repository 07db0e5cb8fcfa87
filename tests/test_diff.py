"""Differences between plans, modes and meshes: complete, exact to the layer, and said once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from golden import ROOT, TINY
from shardplan.api import compile_plan
from shardplan.cli import command
from shardplan.compiled import CompiledPlan
from shardplan.diff import Change, differences
from shardplan.facts import Fact, in_situation, rows, structure
from shardplan.inventory import take_inventory
from tiny_models import SIZES, build_meta

PLAN = ROOT / "plans" / "llama.yaml"
MODEL = take_inventory(build_meta("llama"))
HIDDEN, INNER = SIZES["hidden_size"], SIZES["intermediate_size"]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def compiled(
    plan: Any = PLAN, mesh: str = "dp=2,tp=2", sequence_parallel: bool = False, **options: Any
) -> CompiledPlan:
    return compile_plan(plan, MODEL, mesh, sequence_parallel=sequence_parallel, **options)


def between(first: CompiledPlan, second: CompiledPlan) -> dict[tuple[str, str], Change]:
    return {(c.section, c.names): c for c in differences(in_situation(first), in_situation(second))}


def fields(change: Change) -> dict[str, tuple[Any, Any]]:
    return {field.name: (field.before, field.after) for field in change.fields}


def whole_mlp(folder: Path, layers: str = "1") -> list[Path]:
    path = folder / "overlay.yaml"
    path.write_text(
        f"format: 1\nrules:\n  .layers.{layers}.mlp: null\n  .layers.{layers}.mlp.{{gate,up,down}}_proj: null\n"
    )
    return [PLAN, path]


def test_equal_plans_do_not_differ() -> None:
    assert between(compiled(), compiled()) == {}
    assert differences(structure(compiled()), structure(compiled(mesh="dp=4,tp=1", sequence_parallel=True))) == ()


def test_another_plan(tmp_path: Path) -> None:
    changes = between(compiled(), compiled(whole_mlp(tmp_path)))
    up = changes["parameters", "model.layers.1.mlp.up_proj.weight"]
    nbytes = 4 * HIDDEN * INNER
    assert (up.kind, up.count) == ("changed", 1)
    assert fields(up) == {
        "placement": ("shard(0)", "replicate"),
        "nbytes_per_tp_rank": (nbytes // 2, nbytes),
        "nbytes_per_rank": (nbytes // 4, nbytes // 2),
    }
    edge = changes["inputs", "model.layers.1.mlp"]
    assert (edge.kind, fields(edge)["runs"]) == ("gone", ("identity / all_reduce", None))
    assert fields(changes["totals", "(the model)"])["collectives_forward"] == (5, 4)
    assert {names for _, names in changes if "layers.0" in names} == set()
    assert str(edge) == "model.layers.1.mlp: gone, it was conversion stream -> replicate, runs identity / all_reduce"


def test_layers_that_change_alike_are_one_change(tmp_path: Path) -> None:
    changes = between(compiled(), compiled(whole_mlp(tmp_path, "*")))
    assert changes["parameters", "model.layers.[0-1].mlp.up_proj.weight"].count == 2


def test_another_mode() -> None:
    changes = between(compiled(), compiled(sequence_parallel=True))
    assert fields(changes["totals", "(the model)"]) == {
        "collectives_forward": (5, 10), "collectives_backward": (5, 10), "gradient_sums": (0, 3),
    }  # fmt: skip
    norm = changes["parameters", "model.layers.[0-1].input_layernorm.weight"]
    assert fields(norm) == {"gradient_summed": (False, True)}
    assert fields(changes["inputs", "model.layers.[0-1].mlp"]) == {
        "runs": ("identity / all_reduce", "all_gather / reduce_scatter")
    }
    assert {section for section, _ in changes} == {"totals", "parameters", "inputs", "outputs"}


def test_another_mesh() -> None:
    changes = between(compiled(), compiled(mesh="dp=1,tp=1"))
    assert fields(changes["totals", "(the model)"])["collectives_forward"] == (5, 0)
    head = fields(changes["parameters", "lm_head.weight"])
    assert head["nbytes_per_tp_rank"][1] == 2 * head["nbytes_per_tp_rank"][0]
    assert changes["inputs", "model.layers.[0-1].mlp"].kind == "gone"


def test_units_recomputation_and_options() -> None:
    upper = {
        "mixed_precision": {"param": "bfloat16", "reduce": "float32"}, "cpu_offload": True, "recompute": [".layers.*"],
    }  # fmt: skip
    changes = between(compiled(), compiled(**upper))
    assert {key: change.kind for key, change in changes.items()} == {
        ("recomputed", "model.layers.[0-1]"): "new",
        ("options", "mixed_precision"): "new",
        ("options", "cpu_offload"): "changed",
    }


def test_units(tmp_path: Path) -> None:
    path = tmp_path / "units.yaml"
    path.write_text(
        'format: 1\nextends: llama\nfsdp: {units: {".layers.0": {reshard: false}}, root: {reshard: true}}\n'
    )
    changes = between(compiled(), compiled(path))
    assert {key: fields(change) for key, change in changes.items()} == {
        ("fsdp_units", "model.layers.0"): {"reshard": (None, False)},
        ("fsdp_units", "(the model)"): {"reshard": (False, True)},
    }
    assert str(changes["fsdp_units", "model.layers.0"]) == "model.layers.0: reshard default -> no"


def test_every_fact_counts() -> None:
    """Nothing that differs between facts goes unsaid, whichever field it is."""
    facts = in_situation(compiled())
    for at, fact in enumerate(facts):
        for index, (name, _) in enumerate(fact.values):
            changed = list(fact.values)
            changed[index] = (name, "other")
            others = [*facts[:at], Fact(fact.section, fact.name, tuple(changed)), *facts[at + 1 :]]
            (change,) = differences(facts, others)
            assert (change.section, change.names, change.count) == (fact.section, fact.name, 1)
            assert [field.name for field in change.fields] == [name]


def test_rows_stand_for_all_names() -> None:
    facts = structure(compiled())
    assert sum(row.count for row in rows(facts)) == len(facts)
    assert len(rows(facts)) < len(facts)


# ---------------------------------------------------------------- the command line


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(command, ["plans/llama.yaml", *TINY, *map(str, args)], catch_exceptions=False)


def test_the_text(tmp_path: Path) -> None:
    result = run("--diff", "mesh=dp=1,tp=2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:4] == [
        "from plans/llama.yaml on broken_models:llama dp=2,tp=2 TP",
        "to   plans/llama.yaml on broken_models:llama dp=1,tp=2 TP",
        "  totals",
        "    (the model): bytes per rank 17.3 KiB -> 34.6 KiB",
    ]
    assert "    model.layers.[0-1].mlp.up_proj.weight: bytes per rank 1.5 KiB -> 3.0 KiB" in lines
    assert run("--diff", "mode=tp").stdout.splitlines()[2:] == ["  no difference", ""]


def test_the_data(tmp_path: Path) -> None:
    other = whole_mlp(tmp_path)[1]
    upper = tmp_path / "upper.yaml"
    upper.write_text(other.read_text().replace("rules", "extends: llama\nrules"))
    result = run("--diff", upper, "--format", "json")
    assert result.exit_code == 0
    ((entry,), findings) = (json.loads(result.stdout)[key] for key in ("differences", "findings"))
    assert entry["after"] == f"{upper} on broken_models:llama dp=2,tp=2 TP"
    assert {(c["section"], c["names"]) for c in entry["changes"]} >= {("outputs", "model.layers.1.mlp")}
    assert all(finding["severity"] != "error" for finding in findings)


def test_overlays_are_of_the_plan_alone(tmp_path: Path) -> None:
    lines = run("--overlay", whole_mlp(tmp_path)[1], "--diff", "plans/llama.yaml").stdout
    assert "model.layers.1.mlp: new, conversion stream -> replicate" in lines
    assert "no difference" in run("--overlay", whole_mlp(tmp_path)[1], "--diff", "mode=tp").stdout


@pytest.mark.parametrize(
    ("other", "code", "said"),
    [
        ("mode=dp", 2, "is no plan, no mode=tp or mode=sp, and no mesh=AXES"),
        ("model=x", 2, "is no plan, no mode=tp or mode=sp, and no mesh=AXES"),
        ("mesh=pp=2", 2, "SP301"),
        ("mesh=dp=1,tp=8", 1, "SP201"),
        ("no-such-plan", 2, "SP001"),
    ],
)
def test_what_cannot_be_compared(other: str, code: int, said: str) -> None:
    result = run("--diff", other)
    assert result.exit_code == code
    assert said in result.output
    assert "from " not in result.stdout


@pytest.mark.parametrize(
    "args", [("--check", "--diff", "x"), ("--explain", "x", "--diff", "y"), ("--diff", "x", "--lock", "y")]
)
def test_one_question_at_a_time(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "are answered one at a time" in result.stderr
