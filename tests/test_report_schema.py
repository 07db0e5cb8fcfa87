"""The schema of the JSON report: generated, shipped, and true of whatever is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from golden import ROOT, TINY
from shardplan.cli import command
from shardplan.resources import report_schema_path
from shardplan.schema import report_schema, report_schema_text

VALIDATOR = jsonschema.Draft202012Validator(report_schema())
PLAN = "plans/llama.yaml"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, args)), catch_exceptions=False)


def printed(*args: str | Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(*args, "--format", "json").stdout)
    return data


def test_the_shipped_schema_is_the_generated_one() -> None:
    assert report_schema_path().read_text(encoding="utf-8") == report_schema_text(), "make schema"


def test_the_schema_is_printed() -> None:
    result = run("--schema", "report")
    assert (result.exit_code, result.stdout) == (0, report_schema_text())
    assert run("--schema", "plan").stdout == run("--schema").stdout != result.stdout


def test_the_schema_is_one_for_its_draft() -> None:
    jsonschema.Draft202012Validator.check_schema(report_schema())


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (("--check", PLAN, *TINY), None),
        (("--check", "no-such-plan.yaml"), None),
        (("--check", "tests/broken_plans/SP203.yaml", *TINY), None),
        (("--check", "tests/broken_plans/SP902.yaml"), None),
        ((PLAN, *TINY), "plans"),
        ((PLAN, *TINY, "--sequence-parallel"), "plans"),
        (("qwen2", "--model", "qwen2.5-0.5b", "--mesh", "dp=2,dp_replicate=1,tp=2"), "plans"),
        ((PLAN, "no-such-plan.yaml", *TINY), "plans"),
        ((PLAN, *TINY, "--explain", ".layers.*", "--explain", "**.weight", "--explain", ".rotary_emb"), "explanations"),
        ((PLAN, "--model", "llama-3.2-1b", "--mesh", "tp=2", "--explain", "lm_head.weight"), "explanations"),
        (("tests/broken_plans/SP203.yaml", *TINY, "--explain", "lm_head"), "explanations"),
        ((PLAN, *TINY, "--diff", "mode=sp"), "differences"),
        ((PLAN, *TINY, "--diff", "mesh=dp=1,tp=1"), "differences"),
        ((PLAN, *TINY, "--diff", "mode=tp"), "differences"),
        ((PLAN, *TINY, "--dry-run"), "dry_runs"),
    ],
)  # fmt: skip
def test_what_is_printed_is_valid(args: tuple[str, ...], key: str | None) -> None:
    data = printed(*args)
    jsonschema.validate(data, report_schema(), jsonschema.Draft202012Validator)
    assert set(data) == {"findings", *([key] if key else [])}


def test_a_lock_adds_nothing_to_the_findings(tmp_path: Path) -> None:
    lock = ("--lock", tmp_path / "lock.json")
    for args in ((PLAN, *TINY, *lock), ("--check", PLAN, *TINY, *lock)):
        assert printed(*args) == {"findings": []}
    assert not VALIDATOR.is_valid({"findings": [], "proofs": [{}]})


@pytest.mark.usefixtures("verify_on_pool")
def test_proofs_are_valid_too() -> None:
    data = printed("--verify", PLAN, *TINY, "--no-sequence-parallel")
    VALIDATOR.validate(data)
    assert [proof["holds"] for proof in data["proofs"]] == [True]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["findings"].append({"code": "SP101"}),
        lambda data: data.update(more=[]),
        lambda data: data.pop("findings"),
        lambda data: data["plans"][0].pop("degrees"),
        lambda data: data["plans"][0]["degrees"].update(legal=["1"]),
        lambda data: data["plans"][0]["rules"][0].update(nbytes=1),
        lambda data: data["plans"][0]["compiled"]["edges"][0].update(collective="all_reduce"),
    ],
)
def test_the_schema_refuses_what_is_not_printed(change: Any) -> None:
    data = printed(PLAN, *TINY)
    assert VALIDATOR.is_valid(data)
    change(data)
    assert not VALIDATOR.is_valid(data)
