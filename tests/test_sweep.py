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


def test_nothing_is_wrong_that_the_checks_let_pass() -> None:
    departs = [name for name, verdicts in TABLE.items() for verdict in verdicts if verdict[:5] in ("WRONG", "raise")]
    assert departs == []


def test_the_table_has_no_other_types() -> None:
    assert set(TABLE) <= set(sweep.types())
