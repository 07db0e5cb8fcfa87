from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from shardplan.diagnostics import Diagnostic, Location, PlanError
from shardplan.load import load_plan
from shardplan.merge import merge, resolve_layers
from shardplan.plan import MixedPrecision, Plan, Reference


def plan(folder: Path, name: str, text: str = "") -> Plan:
    path = folder / f"{name}.yaml"
    path.write_text(f"format: 1\n{text}")
    return load_plan(path)


def refusal(upper: Plan) -> Diagnostic:
    with pytest.raises(PlanError) as error:
        resolve_layers(upper)
    (finding,) = error.value.diagnostics
    return finding


LOW = """
architectures: [A]
root: [model]
rules: {.a: block, .b: colwise}
fsdp: {units: {.u: {}}, root: {reshard: true}}
recompute: [.r]
sequence_parallel: true
logits: sharded
mixed_precision: {param: bfloat16, reduce: float32}
cpu_offload: true
reference: {models: [m], meshes: [tp=2]}
fallback: none
"""
HIGH = """
architectures: [B]
root: [backbone]
rules: {.a: colwise}
fsdp: {units: {.v: {}}, root: {reshard: false}}
recompute: [.s]
sequence_parallel: false
logits: gathered
mixed_precision: {param: float16, output: float32}
cpu_offload: false
reference: {meshes: [tp=4]}
fallback: none
"""


def test_the_highest_layer_that_speaks_is_heard(tmp_path: Path) -> None:
    merged = merge([plan(tmp_path, "low", LOW), plan(tmp_path, "high", HIGH)])
    assert (merged.name, merged.where.file) == ("high", str(tmp_path / "high.yaml"))
    assert (merged.architectures, merged.roots) == (("B",), ("backbone",))
    assert (merged.root_reshard, merged.sequence_parallel, merged.cpu_offload) == (False, False, False)
    assert merged.logits == "gathered"
    assert merged.mixed_precision == MixedPrecision("float16", "float32", "float32")
    assert merged.reference == Reference(("m",), ("tp=4",))


def test_a_silent_layer_changes_nothing(tmp_path: Path) -> None:
    low = plan(tmp_path, "low", LOW)
    merged = merge([low, plan(tmp_path, "high")])
    for field in fields(Plan):
        if field.name not in ("name", "where", "rank"):
            assert getattr(merged, field.name) == getattr(low, field.name), field.name


def test_patterns_are_kept_with_the_rank_of_their_layer(tmp_path: Path) -> None:
    merged = merge([plan(tmp_path, "low", LOW), plan(tmp_path, "high", HIGH)])
    assert [(str(r.pattern), r.layer.rank, r.layer.name) for r in merged.rules] == [
        (".a", 0, "low"),
        (".b", 0, "low"),
        (".a", 1, "high"),
    ]
    assert [(str(u.pattern), u.layer.rank) for u in merged.units] == [(".u", 0), (".v", 1)]
    assert [(str(r.pattern), r.layer.rank) for r in merged.recompute or ()] == [(".r", 0), (".s", 1)]


def test_merging_what_is_merged_keeps_its_order(tmp_path: Path) -> None:
    low, middle, high = (plan(tmp_path, name, f"rules: {{.{name}: block}}\n") for name in ("low", "middle", "high"))
    assert merge([merge([low, middle]), high]) == merge([low, middle, high])
    assert merge([low, merge([middle, high])]) == merge([low, middle, high])
    assert [rule.layer.rank for rule in merge([low, middle, high]).rules] == [0, 1, 2]
    assert merge([low, middle, high]).rank == 2


def test_a_silent_layer_has_a_rank_of_its_own(tmp_path: Path) -> None:
    low, silent, high = plan(tmp_path, "low", LOW), plan(tmp_path, "silent"), plan(tmp_path, "high", HIGH)
    assert (merge([low, silent]).rank, merge([low]).rank) == (1, 0)
    assert merge([merge([low, silent]), high]) == merge([low, silent, high])
    assert [rule.layer.rank for rule in merge([merge([low, silent]), high]).rules] == [0, 0, 2]


def test_recompute_stays_unsaid_when_no_layer_says_it(tmp_path: Path) -> None:
    assert merge([plan(tmp_path, "a"), plan(tmp_path, "b")]).recompute is None
    assert merge([plan(tmp_path, "a", "recompute: []\n"), plan(tmp_path, "b")]).recompute == ()


def test_a_plan_without_extends_is_its_only_layer(tmp_path: Path) -> None:
    alone = plan(tmp_path, "a")
    assert resolve_layers(alone) == (alone,)


def test_extends_is_followed_from_the_folder_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    base = plan(tmp_path, "base", "extends: llama\n")
    middle = plan(tmp_path / "sub", "middle", "extends: ../base.yaml\n")
    top = plan(tmp_path, "top", "extends: sub/middle.yaml\n")
    layers = resolve_layers(top)
    assert [layer.name for layer in layers] == ["llama", "base", "middle", "top"]
    assert layers[1].rules == base.rules
    assert layers[2].extends == middle.extends
    merged = merge(layers)
    assert merged.extends is None
    assert merged.extends_where == Location(str(tmp_path / "top.yaml"), 2, 1)
    assert {rule.layer.kind for rule in merged.rules} == {"shipped"}


def test_layers_that_go_round_in_a_circle(tmp_path: Path) -> None:
    plan(tmp_path, "a", "extends: ./b.yaml\n")
    b = plan(tmp_path, "b", "extends: ./a.yaml\n")
    assert str(refusal(b)).splitlines() == [
        f"{tmp_path}/a.yaml:2:1: error SP011: the layers go round in a circle: b -> a -> b",
        "    hint: remove one 'extends'",
    ]
    itself = plan(tmp_path, "c", "extends: c.yaml\n")
    assert refusal(itself).message == "the layers go round in a circle: c -> c"


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    finding = refusal(plan(tmp_path, "a", "extends: no.yaml\n"))
    assert str(finding).splitlines()[0] == (
        f"{tmp_path}/a.yaml:2:1: error SP011: the plan below, '{tmp_path}/no.yaml', is not there"
    )
    finding = refusal(plan(tmp_path, "a", "extends: lama\n"))
    assert (finding.code, finding.message) == ("SP011", "no shipped plan is named 'lama'")
    assert finding.hint == "did you mean 'llama'?"


def test_what_is_wrong_in_a_lower_file_is_reported_there(tmp_path: Path) -> None:
    upper = plan(tmp_path, "a", "extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("format: 1\nrules: {.a: block, .a: block}\n")
    assert refusal(upper).where is not None
    assert str(refusal(upper).where) == f"{tmp_path}/b.yaml:2:20"
