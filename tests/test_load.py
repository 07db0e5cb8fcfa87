from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardplan.diagnostics import Location, PlanError
from shardplan.from_python import plan_from_dict
from shardplan.layouts import REPLICATE, STREAM, Conversion
from shardplan.load import load_plan
from shardplan.merge import merge, resolve_layers
from shardplan.plan import NULL, MixedPrecision, Plan, Reference
from shardplan.resources import resource_folder, shipped_plans

PLAN = """\
format: 1
architectures: [ALlama]
root: [model, ""]
rules:
  .a: colwise
  .b: null
  .norm: {style: sequence_parallel, output: stream -> replicate}
  .layers.0: {input: replicate -> stream}
fsdp:
  units: {".layers.*": {reshard: 4}, .embed: {}}
  root: {reshard: false}
recompute: [".layers.*"]
sequence_parallel: true
logits: gathered
mixed_precision: {param: bfloat16, reduce: float32}
cpu_offload: false
reference: {models: [m], meshes: ["dp=2,tp=4"]}
extends: llama
fallback: none
"""


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def findings(path: Path) -> list[str]:
    with pytest.raises(PlanError) as error:
        load_plan(path)
    return [str(finding).replace(str(path), "f") for finding in error.value.diagnostics]


def test_every_key_arrives(tmp_path: Path) -> None:
    path = write(tmp_path, PLAN)
    plan = load_plan(path)
    assert (plan.name, plan.where) == ("mine", Location(str(path)))
    assert (plan.architectures, plan.roots) == (("ALlama",), ("model", ""))
    assert [(str(u.pattern), u.reshard, u.where.line) for u in plan.units] == [
        (".layers.*", 4, 10),
        (".embed", None, 10),
    ]
    assert plan.root_reshard is False
    assert [(str(r.pattern), r.where) for r in plan.recompute or ()] == [(".layers.*", Location(str(path), 12, 13))]
    assert (plan.sequence_parallel, plan.logits, plan.cpu_offload) == (True, "gathered", False)
    assert plan.mixed_precision == MixedPrecision("bfloat16", "float32", None)
    assert plan.reference == Reference(("m",), ("dp=2,tp=4",))
    assert (plan.extends, plan.extends_where, plan.fallback) == ("llama", Location(str(path), 18, 1), "none")


def test_a_rule_knows_its_style_edges_line_and_layer(tmp_path: Path) -> None:
    path = write(tmp_path, PLAN)
    a, b, norm, cut = load_plan(path).rules
    assert (a.style, a.where, str(a.layer), a.layer.rank) == ("colwise", Location(str(path), 5, 3), "[user]", 0)
    assert b.style == NULL
    assert (norm.style, norm.input, norm.output) == ("sequence_parallel", None, Conversion(STREAM, REPLICATE))
    assert (cut.style, cut.input) == (None, Conversion(REPLICATE, STREAM))


def test_what_a_file_does_not_say_is_none(tmp_path: Path) -> None:
    path = write(tmp_path, "format: 1\n")
    assert load_plan(path) == Plan("mine", Location(str(path)))


def test_one_root_needs_no_list(tmp_path: Path) -> None:
    assert load_plan(write(tmp_path, "format: 1\nroot: model\n")).roots == ("model",)


def test_a_plan_is_returned_as_it_is() -> None:
    plan = Plan("p", Location("p"))
    assert load_plan(plan) is plan


def test_all_findings_come_at_once_and_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "format: 1\nrules:\n  .a..b: block\n  .c: block\n  .c: block\n  .d:\nrecompute: ['x y']\n"
        "reference: {meshes: ['ep=2,tp=2']}\n",
    )
    assert [finding.splitlines()[0] for finding in findings(path)] == [
        "f:3:3: error SP009: '.a..b' is no pattern: '.a..b' has an empty name between two dots or at its end",
        "f:5:3: error SP004: '.c' is written twice, first at f:4:3",
        "f:6:3: error SP006: '.d' has no value",
        "f:7:13: error SP009: 'x y' is no pattern: a space cannot be part of a pattern: "
        "patterns are paths with *, **, {a,b}, [0-3] and @Class",
        "f:8:22: error SP301: axis 'ep' of size 2 in mesh 'ep=2,tp=2' is not one that a plan uses",
    ]


def test_findings_of_yaml_and_of_types_come_together(tmp_path: Path) -> None:
    path = write(tmp_path, "format: 1\nlogits: x\nrules: {0: block}\n")
    assert [finding.split()[2] for finding in findings(path)] == ["SP008:", "SP005:"]


def test_transformers_own_plan_is_a_layer(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path, "format: 1\nextends: hf\n"))
    assert plan.over_hf
    assert merge(resolve_layers(plan)).over_hf
    assert not load_plan("llama").over_hf


@pytest.mark.parametrize(
    ("said", "filled"),
    [
        ("", True),
        ("fallback: hf", True),
        ("fallback: none", False),
        ("extends: llama", False),
        ("{extends: llama, fallback: hf}", True),
        ("extends: hf", False),
    ],
)
def test_transformers_own_plan_fills_unless_told_not_to(tmp_path: Path, said: str, filled: bool) -> None:
    document = {"format": 1, **(yaml.safe_load(said) or {})}
    assert merge(resolve_layers(load_plan(write(tmp_path, yaml.safe_dump(document))))).filled is filled


def test_a_dict_is_filled_by_nobody() -> None:
    assert not plan_from_dict({"lm_head": "colwise"}).filled


def test_a_missing_file(tmp_path: Path) -> None:
    assert findings(tmp_path / "no.yaml") == ["f: error SP001: 'f' cannot be read: no such file or directory"]


def test_a_shipped_name() -> None:
    plan = load_plan("llama")
    assert plan.name == "llama"
    assert {rule.layer.kind for rule in plan.rules} == {"shipped"}
    assert load_plan(shipped_plans()["llama"]).rules[0].layer.kind == "shipped"


def test_every_shipped_plan_loads() -> None:
    assert [load_plan(name).name for name in shipped_plans()] == list(shipped_plans())


def test_an_unknown_shipped_name_names_the_closest() -> None:
    with pytest.raises(PlanError) as error:
        load_plan("lama")
    (finding,) = error.value.diagnostics
    assert (finding.code, finding.message) == ("SP001", "no shipped plan is named 'lama'")
    assert finding.expected == f"one of {', '.join(shipped_plans())}"
    assert finding.hint == "did you mean 'llama'?"
    with pytest.raises(PlanError, match=r"a file of your own needs its folder or suffix: \./plan\.yaml"):
        load_plan("zzzz")


def test_a_name_with_a_folder_or_a_suffix_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "format: 1\n", "llama")
    monkeypatch.chdir(tmp_path)
    assert load_plan("./llama").rules == ()
    assert load_plan(Path("llama")).rules == ()
    assert load_plan("llama").rules != ()
    with pytest.raises(PlanError, match=r"'llama\.yaml' cannot be read"):
        load_plan("llama.yaml")


def test_resources_are_found_in_the_package_first_and_then_at_the_top_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "src" / "shardplan"
    package.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="shardplan is installed without its folder 'plans'"):
        resource_folder("plans", package)
    (tmp_path / "plans").mkdir()
    assert resource_folder("plans", package) == tmp_path / "plans"
    (package / "plans").mkdir()
    assert resource_folder("plans", package) == package / "plans"


def test_loading_waits_for_neither_torch_nor_transformers() -> None:
    code = "import sys, shardplan.merge as m; m.load_plan('llama'); print({'torch', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
