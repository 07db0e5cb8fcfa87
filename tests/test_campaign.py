"""A sample of the mutation campaign (tests/campaign.py), at its marks."""

from __future__ import annotations

from datetime import date

import pytest

import campaign
from campaign_table import Verdict
from mutants import mutants
from pool import LentRanks, Pool
from shardplan.resources import shipped_plans

SAMPLE = 2  # mutants, of another plan every day


def of_today() -> str:
    return sorted(shipped_plans())[date.today().toordinal() % len(shipped_plans())]


@pytest.mark.parametrize("plan", [of_today()])
def test_wrong_mutants_are_caught_and_harmless_ones_pass(pool: Pool, plan: str) -> None:
    of_plan = list(mutants(plan))
    chosen = of_plan[:: len(of_plan) // SAMPLE][:SAMPLE]
    verdicts = list(campaign.judge(pool, LentRanks(pool, 2), plan, chosen))
    assert len(verdicts) == 2 * len(chosen)
    assert [verdict for verdict in verdicts if missed(verdict)] == []


def missed(verdict: Verdict) -> bool:
    """What may not happen even once: a wrong plan that passes, or a harmless one that a run refuses."""
    by_a_run = bool(verdict.raised or verdict.verified)
    return (verdict.truth == "wrong" and verdict.passed) or (verdict.truth == "harmless" and by_a_run)


def test_every_kind_of_mutation_is_there() -> None:
    kinds = {mutant.kind for mutant in mutants("phi3")}
    assert kinds == {"drop", "style", "options", "misspell", "move", "layout", "fsdp", "wildcard", "class"}
