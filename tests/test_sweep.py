"""A sample of docs/coverage.md, another one every day: what the sweep (tests/sweep.py) says is still so."""

from __future__ import annotations

from datetime import date

import pytest

import sweep

SAMPLE = 2  # types of models a day
TABLE = sweep.read_table()


def of_today() -> list[str]:
    names, first = sorted(TABLE), SAMPLE * date.today().toordinal()
    return [names[(first + number) % len(names)] for number in range(SAMPLE)]


@pytest.mark.processes
@pytest.mark.parametrize("name", of_today())
def test_the_table_still_holds(name: str) -> None:
    (row,) = sweep.sweep([name])
    assert (row.tp, row.sp) == TABLE[name]


def test_what_departs_is_refused_or_listed() -> None:
    """A model that raises or computes otherwise is refused by the checks, or listed as not explained."""
    wrong = {name for name, verdicts in TABLE.items() if any(verdict.startswith("WRONG") for verdict in verdicts)}
    assert wrong <= set(sweep.NOT_EXPLAINED)


def test_the_table_has_no_other_types() -> None:
    assert set(TABLE) <= set(sweep.types())
