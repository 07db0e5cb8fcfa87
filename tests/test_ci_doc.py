"""docs/ci.md and the pre-commit hook: every command that they show runs, on a project with a plan of its own."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from golden import ROOT
from shardplan.cli import command

TEXT = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
WRITE = "plan-compile --lock plans.lock.json plans/*.yaml"
OWN = "format: 1\nextends: llama\nreference: {models: ['broken_models:llama'], meshes: ['dp=2,tp=2']}\n"


def strings(data: Any) -> Iterator[str]:
    """Every text in what YAML holds."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for part in data.values() if isinstance(data, dict) else data:
            yield from strings(part)


def commands() -> list[str]:
    """Those of the jobs, those on lines of their own, and those within sentences, each once."""
    prose = re.sub(r"^```yaml\n.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    of_jobs = [text for block in BLOCKS for text in strings(block)]
    found = [*of_jobs, *re.findall(r"^    (.+)$", prose, re.MULTILINE), *re.findall(r"`([^`\n]+)`", prose)]
    return list(dict.fromkeys(text for text in found if text.startswith("plan-compile ")))


def run(line: str, *files: str) -> Result:
    """Run it as a shell would; what a hook shows without files gets some."""
    program, *words = shlex.split(line)
    assert program == "plan-compile"
    args = [word for part in words for word in (sorted(map(str, Path().glob(part))) if "*.yaml" in part else [part])]
    return CliRunner().invoke(command, [*args, *files], catch_exceptions=False)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a plan, and the lock of it that the page says to write."""
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "plans" / "own.yaml"
    plan.parent.mkdir()
    plan.write_text(OWN)
    assert run(WRITE).output == ""
    return plan


@pytest.mark.parametrize(
    "line", [pytest.param(c, marks=pytest.mark.processes if "--verify" in c else ()) for c in commands()]
)
def test_a_command_runs(request: pytest.FixtureRequest, line: str) -> None:
    if "--verify" in line:
        request.getfixturevalue("verify_on_pool")
    shows_no_file = ".yaml" not in line and "--schema" not in line
    result = run(line, *(["plans/own.yaml"] if shows_no_file else []))
    assert result.exit_code == 0, result.output
    if "--check" in line and "--format json" not in line:
        assert result.output == ""
    elif line != WRITE:
        assert result.stdout


def test_the_page_shows_all_that_it_should() -> None:
    shown = " ".join(commands())
    for option in ("--check", "--lock", "--strict", "--format github", "--diff", "--explain", "--dry-run", "--verify"):
        assert option in shown
    assert WRITE in commands()
    assert len(BLOCKS) == 3


def test_the_jobs_fail_on_a_broken_plan_and_on_a_broken_lock(project: Path) -> None:
    jobs = [text for block in BLOCKS for text in strings(block) if text.startswith("plan-compile --check ")]
    project.write_text(OWN + "rules:\n  .layers.*.mlp.down_proj: null\n")
    results = [run(line, *([] if "plans/" in line else ["plans/own.yaml"])) for line in jobs]
    assert [result.exit_code for result in results] == [1] * len(jobs)
    project.write_text(OWN + "fsdp: {root: {reshard: true}}\n")
    for line in jobs:
        if "--lock" in line:
            result = run(line)
            assert result.exit_code == 1
            assert "SP305" in result.stdout


def test_every_link_leads_to_a_file() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


# ---------------------------------------------------------------- the hook of this repository


def test_the_hook_is_one_for_pre_commit() -> None:
    """The keys that pre-commit asks for, and the program is one that installing the package makes."""
    (hook,) = HOOKS
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert hook["language"] == "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shlex.split(hook["entry"])[0] in project["scripts"]


def test_the_hook_is_given_plans_and_nothing_else() -> None:
    """pre-commit searches ``files`` in paths from the repository's root."""
    (hook,) = HOOKS
    files = re.compile(hook["files"])
    assert all(files.search(path) for path in ("plans/llama.yaml", "training/plans/own.yaml"))
    assert not any(files.search(path) for path in ("docs/plans.md", "config.yaml", "src/shardplans/x.yaml"))
    assert hook["types"] == ["yaml"]


def test_the_hook_passes_a_right_plan_and_fails_a_wrong_one(project: Path) -> None:
    """As pre-commit calls it: the entry, then the files that changed."""
    (hook,) = HOOKS
    assert run(hook["entry"], "plans/own.yaml").output == ""
    project.write_text(OWN + "rules:\n  .layers.*.mlp.up_prj: colwise\n")
    result = run(hook["entry"], "plans/own.yaml")
    assert result.exit_code == 1
    assert "SP102" in result.stdout
