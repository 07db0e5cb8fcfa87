"""Each code has a broken plan; what is said about it is compared to the letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import diagnostics_doc
from golden import ROOT, arguments, broken_plans, checked
from shardplan.diagnostics import CODES

# Raised by apply_plan alone; tested there.
APPLY_ONLY = {"SP302", "SP303"}

# Everything else exits with 1, the plan is wrong.
SAID_ONLY = ("SP110", "SP111", "SP207", "SP209", "SP211", "SP213", "SP215", "SP902")  # warnings and notes
COULD_NOT_CHECK = ("SP001", "SP301", "SP901", "SP903", "SP904")


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def slow_ones_apart() -> list[Any]:
    """What starts processes, or runs a model, is not for `make check`."""
    runs = {plan: {"--verify", "--dry-run"}.intersection(arguments(plan)) for plan in broken_plans()}
    return [pytest.param(p, id=p.stem, marks=[pytest.mark.processes] if run else []) for p, run in runs.items()]


@pytest.mark.parametrize("plan", slow_ones_apart())
def test_a_broken_plan_is_refused_in_these_words(request: pytest.FixtureRequest, plan: Path) -> None:
    if "--verify" in arguments(plan):
        request.getfixturevalue("verify_on_pool")
    code = plan.stem.split("-")[0]
    result = checked(plan)
    assert result.stdout == plan.with_suffix(".txt").read_text(encoding="utf-8"), "make golden, and read the difference"
    assert result.stderr == ""
    assert f" {code}: " in result.stdout
    assert result.exit_code == exit_code(plan, code)


def exit_code(plan: Path, code: str) -> int:
    if plan.stem.endswith("-in-the-file"):  # then the mesh or the model is the plan's fault
        return 1
    if plan.stem == "SP206-head-norms":  # right all the same
        return 0
    return 0 if code in SAID_ONLY else 2 if code in COULD_NOT_CHECK else 1


@pytest.mark.parametrize("plan", broken_plans(), ids=lambda plan: plan.stem)
def test_a_message_stands_alone(plan: Path) -> None:
    said = plan.with_suffix(".txt").read_text(encoding="utf-8")
    assert str(ROOT) not in said, "files are named from the working directory"
    assert "object at 0x" not in said
    assert not any(layer in said for layer in ("layers.1.", "layers.31.")), "one message for a fault, not one a layer"


def test_every_code_has_a_broken_plan() -> None:
    shown = {plan.stem.split("-")[0] for plan in broken_plans()}
    assert shown | APPLY_ONLY == set(CODES)
    assert not shown & APPLY_ONLY


def test_every_output_belongs_to_a_plan() -> None:
    assert {path.with_suffix(".yaml") for path in broken_plans()[0].parent.glob("*.txt")} == set(broken_plans())


def test_the_document_shows_all_of_them() -> None:
    assert set(diagnostics_doc.MEANING) == set(CODES)
    assert diagnostics_doc.DOCUMENT.read_text(encoding="utf-8") == diagnostics_doc.text(), "make golden"
