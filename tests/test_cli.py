"""``plan-compile``: exit codes, formats, what goes to stdout, and how plans, layers, models and modes are chosen."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from golden import COMPILED, LLAMA, ROOT, TINY, compiled
from shardplan import cli
from shardplan.resources import plan_schema_path, shipped_plans

PLAN = "plans/llama.yaml"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.command, [str(arg) for arg in args])


def plan(folder: Path, text: str, name: str = "plan.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def said(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return found


WARNED = "format: 1\nextends: llama\nrules:\n  .layers.*.mlp: {input: stream, output: stream}\n"


# ---------------------------------------------------------------- exit codes


def test_a_clean_plan_is_quiet() -> None:
    result = run("--check", PLAN, *LLAMA)
    assert (result.exit_code, result.output) == (0, "")


def test_no_plan_means_all_shipped_ones_on_their_own_references() -> None:
    """The published GPT-2 has dropout, and some meshes have more ranks than a model has KV heads: that is said."""
    result = run("--check", "--format", "json")
    assert result.exit_code == 0
    warnings = [finding for finding in said(result) if finding["severity"] != "note"]
    assert [finding["code"] for finding in warnings] == ["SP209"]
    assert {situation.split()[0] for situation in warnings[0]["on"]} == {"gpt2"}
    assert {finding["code"] for finding in said(result)} == {"SP209", "SP215"}


def test_all_shipped_plans_are_those_that_are_printed() -> None:
    result = run("--format", "json", *TINY, "--model", "llama-3.2-1b")
    assert {entry["plan"] for entry in json.loads(result.stdout)["plans"]} == {"llama"}
    assert {entry["code"] for entry in said(result)} == {"SP106"}
    assert len(said(result)) == len(shipped_plans()) - 1


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"format: 1\nrules: {.a: [}\n", "SP002"),
        (b"format: 1\nrulez: {}\n", "SP007"),
        (b"format: 1\nname: \xff\xfe\n", "SP012"),
        (b"", "SP012"),
        (b"- a\n- list\n", "SP008"),
        (b'format: 1\nreference: {meshes: ["dp=2,dp=2"]}\n', "SP301"),
        (b"format: 1\nextends: nothing.yaml\n", "SP011"),
    ],
)
def test_a_file_that_is_no_plan_is_wrong(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    result = run("--check", path, "--format", "json", *TINY)
    assert {entry["code"] for entry in said(result)} >= {code}
    assert result.exit_code == 1


@pytest.mark.parametrize(
    "args",
    [
        ("no-such-plan.yaml",),
        ("no-such-name",),
        ("tests",),
        (PLAN, "--overlay", "no-such-overlay.yaml"),
        (PLAN, "--model", "no-such-model", "--mesh", "tp=2"),
        (PLAN, "--model", "no_such_module:Class", "--mesh", "tp=2"),
        (PLAN, "--mesh", "tp"),
        (PLAN, "--mesh", "dp=2,pp=2"),
    ],
)
@pytest.mark.parametrize("mode", [("--check",), ()])
def test_what_cannot_be_had_could_not_be_checked(args: tuple[str, ...], mode: tuple[str, ...]) -> None:
    result = run(*mode, *args)
    assert result.exit_code == 2
    assert " error SP" in f" {result.stdout}"
    assert "Traceback" not in result.output


@pytest.mark.parametrize("args", [("--format", "xml"), ("--no-such-option",), ("--model",)])
def test_usage_errors_go_to_stderr(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr


@pytest.mark.parametrize("option", ["--lock", "--diff", "--explain"])
def test_an_unset_variable_switches_nothing_off(option: str) -> None:
    result = run(PLAN, option, "")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "it is empty" in result.stderr


def test_a_crash_of_our_own_is_not_the_plans_fault(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def crash(*_: object) -> None:
        raise KeyError("our bug")

    monkeypatch.setattr(cli, "check_one", crash)
    monkeypatch.setattr(sys, "argv", ["plan-compile", "--check", PLAN])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    assert left.value.code == 2
    assert captured.out == ""
    assert "plan-compile failed on its own account: KeyError" in captured.err


def test_warnings_pass_unless_strict(tmp_path: Path) -> None:
    args = ("--check", plan(tmp_path, WARNED), *TINY, "--no-sequence-parallel")
    assert run(*args).exit_code == 0
    assert "warning SP207" in run(*args).stdout
    assert run(*args, "--strict").exit_code == 1


def test_notes_pass_even_when_strict(tmp_path: Path) -> None:
    result = run("--check", "--strict", plan(tmp_path, "format: 1\n"))
    assert result.exit_code == 0
    assert "note SP902: only the file was checked: plan 'plan' names no model" in result.stdout


def test_a_wrong_plan_outweighs_one_that_could_not_be_checked(tmp_path: Path) -> None:
    assert run("--check", "missing.yaml", plan(tmp_path, "format: 2\n"), *TINY).exit_code == 1


# ---------------------------------------------------------------- what is checked


def test_plans_are_independent_files(tmp_path: Path) -> None:
    wrong = plan(tmp_path, "format: 1\nextends: llama\nrules:\n  .norm: null\n", "wrong.yaml")
    result = run("--check", PLAN, wrong, "missing.yaml", *TINY, "--format", "json")
    assert [entry["code"] for entry in said(result)] == ["SP204", "SP001"]
    assert result.exit_code == 1
    assert run("--check", PLAN, *TINY).exit_code == 0


def test_without_a_mode_both_are_checked(tmp_path: Path) -> None:
    path = plan(tmp_path, "format: 1\nextends: llama\nrules:\n  .layers.*.input_layernorm: null\n")
    both = run("--check", path, *TINY, "--format", "json")
    assert [(entry["code"], entry["on"]) for entry in said(both)] == [("SP206", ["broken_models:llama dp=2,tp=2 SP"])]
    assert run("--check", path, *TINY, "--sequence-parallel").exit_code == 1
    assert run("--check", path, *TINY, "--no-sequence-parallel").exit_code == 0


def test_a_finding_of_many_situations_is_said_once(tmp_path: Path) -> None:
    path = plan(tmp_path, "format: 1\nextends: llama\nrules:\n  .layers.*.mlp.down_proj: null\n")
    result = run("--check", path)
    assert result.stdout.count("SP203") == 1
    assert "    on: llama-3.2-1b dp=2,tp=4 TP and 19 more\n" in result.stdout
    assert result.stdout.endswith("\n1 error\n")


def test_the_plans_own_references_are_used_when_none_is_given(tmp_path: Path) -> None:
    path = plan(tmp_path, "format: 1\nextends: llama\nreference: {models: [llama-3.1-8b], meshes: [tp=3]}\n")
    (heads,) = said(run("--check", path, "--format", "json", "--no-sequence-parallel"))
    assert heads["code"] == "SP201"
    assert heads["on"] == [f"llama-3.1-8b tp=3 TP (plan {path})"]
    assert run("--check", path, "--mesh", "tp=2").exit_code == 0


def test_an_overlay_lies_on_top_of_each_plan(tmp_path: Path) -> None:
    overlay = plan(tmp_path, "format: 1\nrules:\n  lm_head: {style: colwise, output: shard(-1) -> replicate}\n")
    result = run(PLAN, "--overlay", overlay, *TINY)
    assert f"{overlay}:3:3 [user]" in result.stdout
    assert result.exit_code == 0
    broken = plan(tmp_path, "format: 1\nrules:\n  lm_haed: colwise\n", "broken.yaml")
    result = run("--check", PLAN, "--overlay", overlay, "--overlay", broken, *TINY)
    assert f"{broken}:3:3: error SP102: lm_haed matches nothing" in result.stdout


def test_without_a_model_styles_are_checked_all_the_same(tmp_path: Path) -> None:
    result = run("--check", plan(tmp_path, "format: 1\nrules:\n  .norm: sequence_paralel\n"))
    assert result.exit_code == 1
    assert "SP101: unknown style 'sequence_paralel'" in result.stdout
    assert "SP902" in result.stdout


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    config = json.loads((ROOT / "src/shardplan/reference_models/llama-3.2-1b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    for model in (tmp_path, tmp_path / "config.json", "broken_models:llama"):
        assert run("--check", PLAN, "--model", model, "--mesh", "tp=2").output == ""


# ---------------------------------------------------------------- formats


def test_paths_start_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    path = plan(tmp_path / "sub", "format: 1\nrules:\n  .norm:\n")
    assert run("--check", path).stdout.startswith("sub/plan.yaml:3:3: error SP006: ")
    monkeypatch.chdir("sub")
    assert run("--check", path).stdout.startswith("plan.yaml:3:3: error SP006: ")
    monkeypatch.chdir(ROOT)
    assert run("--check", path).stdout.startswith(f"{path}:3:3: error SP006: ")


def on_a_terminal(*args: str, **environment: str) -> str:
    """What a process writes whose stdout is a terminal."""
    controller, terminal = pty.openpty()
    script = [sys.executable, "-c", "from shardplan.cli import main; main()", *args]
    plain = {name: value for name, value in with_source().items() if name != "NO_COLOR"}
    subprocess.run(script, cwd=ROOT, stdout=terminal, env={**plain, "TERM": "xterm", **environment}, check=False)
    os.close(terminal)
    written = b""
    with suppress(OSError):  # Linux reports the end of a closed terminal as an error
        while part := os.read(controller, 4096):
            written += part
    os.close(controller)
    return written.decode().replace("\r\n", "\n")


def test_colours_are_for_terminals_alone(tmp_path: Path) -> None:
    path = str(plan(tmp_path, "format: 1\nrulez: {}\n"))
    plain = run("--check", path).stdout
    coloured = on_a_terminal("--check", path)
    assert "\x1b[31m\x1b[1merror SP007:\x1b[0m" in coloured
    assert coloured.endswith("\x1b[31m\x1b[1m1 error\x1b[0m\n")
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    assert on_a_terminal("--check", path, NO_COLOR="1") == plain
    assert "\x1b" not in on_a_terminal("--check", "--format", "json", path)


def test_github_commands_are_escaped(tmp_path: Path) -> None:
    path = plan(tmp_path, "format: 1\nrules:\n  .norm: 50%\n", "a,b.yaml")
    lines = run("--check", "--format", "github", path, *TINY).stdout.splitlines()
    assert lines == [f"::error file={tmp_path}/a%2Cb.yaml,line=3,col=10::SP008: '.norm': '50%25' is not a style name"]


def test_github_knows_errors_warnings_and_notices(tmp_path: Path) -> None:
    warned = run("--check", "--format", "github", plan(tmp_path, WARNED), *TINY).stdout.splitlines()
    assert [line.split(" ")[0] for line in warned] == ["::warning", "::error"]
    assert "%0Ahint: add `.layers.*.mlp: block`" in warned[0]
    noted = run("--check", "--format", "github", plan(tmp_path, "format: 1\n"))
    assert noted.stdout.startswith("::notice file=")


def test_json_holds_all_of_a_finding(tmp_path: Path) -> None:
    path = plan(tmp_path, "format: 1\nextends: llama\nrules:\n  .norms: null\n")
    (finding,) = said(run("--check", "--format", "json", path, *TINY, "--no-sequence-parallel"))
    assert finding == {
        "code": "SP102",
        "severity": "error",
        "message": "model.norms matches nothing in LlamaForCausalLM",
        "where": {"file": str(path), "line": 4, "column": 3},
        "subject": "model.norms",
        "expected": "at least one match for every alternative, or a final '?'",
        "hint": "the nearest names are model.norm and model.layers",
        "on": ["broken_models:llama dp=2,tp=2 TP"],
    }
    assert json.loads(run("--check", "--format", "json", PLAN, *TINY).stdout) == {"findings": []}


def test_a_plan_that_is_refused_is_not_printed(tmp_path: Path) -> None:
    path = plan(tmp_path, "format: 1\nextends: llama\nrules:\n  .layers.*.mlp.down_proj: null\n")
    result = run(path, *TINY)
    assert result.exit_code == 1
    assert "collectives" not in result.stdout
    assert json.loads(run(path, *TINY, "--format", "json").stdout)["plans"] == []


def test_the_schema_is_the_shipped_one() -> None:
    result = run("--schema")
    assert (result.exit_code, result.stdout) == (0, plan_schema_path().read_text(encoding="utf-8"))


def test_c52_an_unquoted_special_character(tmp_path: Path) -> None:
    for char, key in (("*", "*.q_proj"), ("@", "@Llama*"), ("{", "{a,b}.x"), ("[", "[0-3].x"), ("?", "?x")):
        path = plan(tmp_path, f"format: 1\nrules:\n  {key}: colwise\n")
        result = run("--check", path, *TINY)
        assert result.exit_code == 1, key
        assert result.stdout.startswith(f"{path}:3:3: error SP003: '{char}' at the start of unquoted text"), key
        assert f'hint: quote it: "{key}"' in result.stdout
        assert "Traceback" not in result.output


@pytest.mark.processes  # a process of its own, and seconds of it
def test_stdout_carries_only_the_report() -> None:
    """A whole process: nothing of torch or transformers gets in between."""
    code = "from shardplan.cli import main; main()"
    args = [sys.executable, "-c", code, "--check", "--format", "json", PLAN, *LLAMA]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"findings": []})


def test_the_compiled_plans_are_printed_as_before() -> None:
    outputs = compiled()
    assert set(outputs) == set(COMPILED.iterdir())
    for path, output in outputs.items():
        assert output == path.read_text(encoding="utf-8"), f"make golden, and read the difference in {path.name}"


# ---------------------------------------------------------------- a user's own modules


OWN = """
from dataclasses import replace
from shardplan.styles import STYLES as TABLE
from transformers import LlamaConfig, LlamaForCausalLM

STYLES = {"cut": replace(TABLE["colwise"], name="cut")}

def tiny():
    return LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=32))
"""


def run_in(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from shardplan.cli import main; main()", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=with_source(), check=False)


def with_source() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.processes  # a process of its own, and seconds of it
def test_own_styles_and_models_are_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    plan(tmp_path, "format: 1\nextends: llama\nrules: {'.layers.*.mlp.{gate,up}_proj': cut}\n")
    on = ("--check", "plan.yaml", "--model", "mine:tiny", "--mesh", "tp=2")
    clean = run_in(tmp_path, *on, "--styles", "mine")
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as the command does for itself
    unknown = run(*on)
    assert unknown.exit_code == 1
    assert "unknown style 'cut'" in unknown.stdout


@pytest.mark.parametrize(("module", "said"), [("nowhere", "cannot import 'nowhere'"), ("json", "'json' has no STYLES")])
def test_a_module_without_styles_is_a_usage_error(module: str, said: str) -> None:
    result = run("--check", PLAN, "--styles", module)
    assert result.exit_code == 2
    assert said in result.stderr
