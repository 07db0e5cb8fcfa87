"""Each code has a broken plan; what is said about it is compared to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

import diagnostics_doc
from golden import ROOT, broken_plans, checked
from shardplan.diagnostics import CODES

# Raised by apply_plan alone; tested there.
APPLY_ONLY = {"SP302", "SP303"}

# Everything else exits with 1, the plan is wrong.
EXIT_CODES = {"SP001": 2, "SP301": 2, "SP901": 2, "SP207": 0, "SP209": 0, "SP902": 0, "SP904": 2}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("plan", broken_plans(), ids=lambda plan: plan.stem)
def test_a_broken_plan_is_refused_in_these_words(plan: Path) -> None:
    code = plan.stem.split("-")[0]
    result = checked(plan)
    assert result.stdout == plan.with_suffix(".txt").read_text(encoding="utf-8"), "make golden, and read the difference"
    assert result.stderr == ""
    assert f" {code}: " in result.stdout
    assert result.exit_code == {"SP001": 2, "SP207": 0, "SP209": 0, "SP901": 2, "SP902": 0, "SP904": 2}.get(
        code, 2 if plan.stem in ("SP301", "SP301-order") else 1
    )


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
