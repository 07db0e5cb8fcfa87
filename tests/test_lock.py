"""The lock: written the same every time, small, blind to edits that change nothing, and broken by all that do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from golden import ROOT, TINY
from shardplan.api import compile_plan
from shardplan.cli import command
from shardplan.inventory import take_inventory
from shardplan.lock import Locked, broken, lock_text, read_lock
from shardplan.references import build_meta_model
from tiny_models import build_meta

PLAN = "format: 1\nextends: llama\nreference: {models: ['broken_models:llama'], meshes: ['dp=2,tp=2', tp=2]}\n"


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, args)), catch_exceptions=False)


def write(*args: str) -> str:
    result = run("plan.yaml", "--lock", "lock.json", *args)
    assert (result.exit_code, result.output) == (0, "")
    return Path("lock.json").read_text(encoding="utf-8")


def check(*args: str) -> Result:
    return run("--check", "plan.yaml", "--lock", "lock.json", *args)


def said(result: Result) -> list[str]:
    """What is said of the lock, without its file and the way out."""
    assert result.exit_code == 1, result.output
    return re.findall(r"error SP305: (.*)", result.stdout)


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read_back() -> None:
    model = take_inventory(build_meta("llama", tie_word_embeddings=True))
    entries = [
        Locked.of("plan", "m", compile_plan("llama", model, mesh, sequence_parallel=sp), sequence_parallel=sp)
        for mesh in ("dp=2,tp=4", "tp=2")
        for sp in (False, True)
    ]
    assert {entry.situation: entry for entry in read_lock(lock_text(entries))}.keys() == {e.situation for e in entries}
    for entry, back in zip(entries, read_lock(lock_text(entries)), strict=True):
        assert (entry.plan, entry.situation, entry.totals) == (back.plan, back.situation, back.totals)
        assert set(entry.facts) == set(back.facts)
    assert list(broken(entries, read_lock(lock_text(entries)), narrowed=False)) == []


def test_layers_are_one_line() -> None:
    """126 layers, and a line for each kind of thing in them."""
    compiled = compile_plan("llama", take_inventory(build_meta_model("llama-3.1-405b")), "dp=1024,tp=8")
    text = lock_text([Locked.of("llama", "llama-3.1-405b", compiled, sequence_parallel=False)])
    assert len(text.splitlines()) < 60
    assert '"model.layers.[0-125].mlp.up_proj.weight": {"shape": "53248 x 16384", "placement": "shard(0)"' in text
    assert json.loads(text)["format"] == 1


def test_a_lock_is_the_same_every_time_and_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    first = write()
    assert first == write()
    assert str(Path.cwd()) not in first
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    assert run("../plan.yaml", "--lock", "../lock.json").output == ""
    assert Path("../lock.json").read_text() == first
    assert run(Path("../plan.yaml").resolve(), "--lock", "../lock.json").output == ""
    assert Path("../lock.json").read_text() == first


def test_an_edit_that_changes_nothing_keeps_the_lock() -> None:
    first = write()
    Path("plan.yaml").write_text("# a comment, and a rule said again\n" + PLAN + "\nrules:\n\n  .norm: "
                                 "{style: sequence_parallel, output: stream -> replicate}\n")  # fmt: skip
    assert check().output == ""
    assert write() == first


# ---------------------------------------------------------------- the check


def test_a_lock_that_holds_is_quiet() -> None:
    write()
    result = check()
    assert (result.exit_code, result.output) == (0, "")


MLP = "rules:\n  .layers.{0}.mlp: null\n  .layers.{0}.mlp.{{gate,up,down}}_proj: null\n"


def test_what_changed_is_named_and_grouped() -> None:
    write()
    Path("plan.yaml").write_text(PLAN + MLP.format("*"))
    found = said(check())
    assert (
        "the lock lock.json does not hold for parameters: model.layers.[0-1].mlp.up_proj.weight: "
        "placement shard(0) -> replicate" in found
    )
    assert (
        "the lock lock.json does not hold for outputs: model.layers.[0-1].mlp: gone, it was conversion "
        "partial -> stream, tensor parallel all_reduce / identity, sequence parallel reduce_scatter / all_gather"
        in found
    )
    assert len(found) == 3 + 2 + len([entry for entry in found if "for totals" in entry])
    Path("plan.yaml").write_text(PLAN + MLP.format("1"))
    assert all("layers.1." in entry or "totals" in entry for entry in said(check()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("logits: gathered\n", "options: logits: gathered no -> yes"),
        ("recompute: ['.layers.*']\n", "recomputed: model.layers.[0-1]: new, recomputed yes"),
        ("fsdp: {units: {'.layers.0': {reshard: 2}}}\n", "fsdp units: model.layers.0: reshard default -> 2"),
        ("fsdp: {root: {reshard: true}}\n", "fsdp units: (the model): reshard no -> yes"),
    ],
)
def test_every_part_of_a_plan_is_locked(change: str, expected: str) -> None:
    write()
    Path("plan.yaml").write_text(PLAN + change)
    assert f"the lock lock.json does not hold for {expected}" in said(check())


def test_options_of_fsdp_are_locked() -> None:
    args = ("--mesh", "dp=2,tp=2")
    write(*args)
    Path("plan.yaml").write_text(PLAN + "mixed_precision: {param: bfloat16, reduce: float32}\ncpu_offload: true\n")
    options = [entry.removeprefix("the lock lock.json does not hold for options: ") for entry in said(check(*args))]
    assert options == ["cpu_offload: on no -> yes", "mixed_precision: new, param bfloat16, reduce float32"]


def test_a_change_of_the_model_breaks_the_lock() -> None:
    write()
    text = Path("lock.json").read_text()
    Path("lock.json").write_text(text.replace("32 x 48", "32 x 56"))
    assert said(check()) == [
        "the lock lock.json does not hold for parameters: model.layers.[0-1].mlp.down_proj.weight: "
        "shape 32 x 56 -> 32 x 48"
    ]


def test_calls_and_bytes_are_locked_by_situation() -> None:
    text = write()
    Path("lock.json").write_text(text.replace('"gradient_sums": 3', '"gradient_sums": 4', 1))
    assert said(check()) == ["the lock lock.json does not hold for totals: (the model): gradient sums 4 -> 3"]


def test_situations_come_and_go() -> None:
    write()
    Path("plan.yaml").write_text(PLAN.replace("tp=2]", "'dp=4,tp=2']"))
    assert said(check("--no-sequence-parallel")) == ["broken_models:llama dp=4,tp=2 TP is not in the lock lock.json"]
    gone = {f"broken_models:llama tp=2 {mode} is in the lock lock.json, and no longer among the plan's references"
            for mode in ("TP", "SP")}  # fmt: skip
    new = {f"broken_models:llama dp=4,tp=2 {mode} is not in the lock lock.json" for mode in ("TP", "SP")}
    assert set(said(check())) == gone | new


def test_a_narrower_check_asks_for_no_more() -> None:
    write()
    assert check("--mesh", "tp=2", "--sequence-parallel").output == ""
    assert said(check("--mesh", "tp=1")) == [
        f"broken_models:llama tp=1 {m} is not in the lock lock.json" for m in ("TP", "SP")
    ]


def test_several_plans_share_a_lock() -> None:
    Path("other.yaml").write_text(PLAN)
    assert run("plan.yaml", "other.yaml", "--lock", "lock.json").output == ""
    assert check().output == ""
    Path("third.yaml").write_text(PLAN)
    result = run("--check", "plan.yaml", "third.yaml", "other.yaml", "--lock", "lock.json")
    assert said(result) == ["plan 'third.yaml' is not in the lock lock.json"]
    overlay = Path("overlay.yaml")
    overlay.write_text("format: 1\n")
    assert said(check("--overlay", "overlay.yaml")) == ["plan 'plan.yaml + overlay.yaml' is not in the lock lock.json"]


def test_a_refused_plan_is_not_locked() -> None:
    Path("plan.yaml").write_text(PLAN + "rules:\n  .layers.*.mlp.down_proj: null\n")
    result = run("plan.yaml", "--lock", "lock.json")
    assert result.exit_code == 1
    assert "SP203" in result.stdout
    assert not Path("lock.json").exists()


def test_a_refused_plan_is_not_compared() -> None:
    write()
    Path("plan.yaml").write_text(PLAN + "rules:\n  .layers.*.mlp.down_proj: null\n")
    result = check()
    assert result.exit_code == 1
    assert "SP305" not in result.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "'lock.json' cannot be read: No such file or directory"),
        ("", "Invalid JSON"),
        ("{}", "'lock.json' cannot be read: it has no format and no plans; without --check, --lock writes one"),
        ('{"format": 1}', "it has no plans"),
        ("[]", "Input should be an object"),
        ('{"format": 2, "plans": {}}', "format: Input should be 1"),
        ('{"format": 1, "plans": {"p": [{"model": 3}]}}', "plans.p.0.model: Input should be a valid string"),
    ],
)
def test_a_lock_that_cannot_be_read_could_not_be_checked(content: str | None, said: str) -> None:
    if content is not None:
        Path("lock.json").write_text(content)
    result = check()
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_lock_that_cannot_be_written() -> None:
    result = run("plan.yaml", "--lock", "no/such/folder/lock.json")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_a_plan_without_a_model_has_nothing_to_lock() -> None:
    Path("plain.yaml").write_text("format: 1\n")
    result = run("plain.yaml", "--lock", "lock.json")
    assert result.exit_code == 2
    assert "--lock needs a model and a mesh, and plain.yaml names none" in result.stderr


def test_the_shipped_plans_can_be_locked() -> None:
    args = (str(ROOT / "plans/llama.yaml"), "--model", "llama-3.2-1b", "--mesh", "dp=2,tp=4")
    assert run(*args, "--lock", "lock.json").output == ""
    assert run("--check", *args, "--lock", "lock.json").output == ""
    assert run("--check", str(ROOT / "plans/llama.yaml"), *TINY, "--lock", "lock.json").exit_code == 1
