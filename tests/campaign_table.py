"""docs/campaign.md: verdicts of the mutation campaign, the file that keeps them, and the table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants import mutants

DOCUMENT = Path(__file__).parents[1] / "docs" / "campaign.md"


@dataclass(frozen=True)
class Verdict:
    """One mutant in one mode: what it is, and who caught it. ``named``: some finding above a note."""

    plan: str
    kind: str
    text: str
    mode: str
    truth: str  # wrong, wasteful or harmless
    reason: str
    refused: bool
    named: bool
    codes: tuple[str, ...]
    raised: bool | None  # by the dry run; None where a refusal of the check left nothing to run
    verified: bool | None  # whether --verify refused it; None as above

    @property
    def passed(self) -> bool:
        return not (self.refused or self.raised or self.verified)


TRUTHS = ("wrong", "wasteful", "harmless")
HEADINGS = (
    "plan",
    "mutant is",
    "mutants",
    "refused by `--check`",
    "named by `--check`",
    "refused by `--dry-run`",
    "refused by `--verify`",
    "passed",
)


def table(verdicts: Iterable[Verdict]) -> str:
    """How many of each kind each rung catches, by plan and over all. The others see what ``--check`` let pass."""
    listed = list(verdicts)
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS))]
    for plan in (*dict.fromkeys(v.plan for v in listed), "all"):
        for truth in TRUTHS:
            own = [v for v in listed if v.truth == truth and plan in (v.plan, "all")]
            counts = (
                sum(v.refused for v in own),
                sum(bool(v.codes) for v in own),
                sum(bool(v.raised) for v in own),
                sum(bool(v.verified) for v in own),
                sum(v.passed for v in own),
            )
            shares = [f"{number} ({100 * number / len(own):.1f} %)" if own else "0" for number in counts]
            lines.append(_line([plan, truth, str(len(own)), *shares]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def exceptions(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """What the table counts against the checker, one by one."""
    for v in verdicts:
        found = f"{v.plan}, {v.mode}: `{v.text}`"
        if v.truth == "wrong" and not v.refused:
            proof = "PASSED" if v.passed else "refused"
            yield f"- wrong, not refused by `--check`, {proof} by a run: {found}: {v.reason}"
        elif v.truth == "wasteful" and not v.codes:
            yield f"- wasteful, not named: {found}: {v.reason}"
        elif v.truth == "harmless" and not v.passed:
            yield f"- harmless, refused: {found}: {', '.join(v.codes) or 'by a run'}"


INTRODUCTION = """# The checker, checked

<!-- written by tests/campaign.py -->

From every shipped plan all single mutations are derived (`tests/mutants.py`): a rule dropped, another style, a path
misspelt, moved a level, a layout changed, an FSDP2 unit dropped or split, a wildcard or a class selector changed.
An oracle (`tests/oracle.py`) applies each without asking the checks, on other models, sizes, seeds and meshes than
`--verify` uses, and compares logits, loss, every gradient, replicas and the gradient norm with the unsharded model.
*Wrong*: numbers change, or it crashes. *Wasteful*: numbers hold, but memory or communication suffer, or what was
written does nothing or states a layout that is not there. *Harmless*: neither. Each mutant counts once in each mode;
those that compile to the same are run once (`tests/alike.py`).
*Named*: refused, or said in a warning or a note. The runs look only at what `--check` lets pass. Checks and dry runs
are of models of real width with a few layers of every kind (`tests/real_models.py`).
"""


def report(verdicts: list[Verdict]) -> str:
    odd = list(exceptions(verdicts))
    by_mode = Counter((verdict.plan, verdict.mode) for verdict in verdicts)
    all_of = {plan: len(list(mutants(plan))) for plan in dict.fromkeys(verdict.plan for verdict in verdicts)}
    looked_at = ", ".join(f"{number} of {plan}'s {all_of[plan]} in {mode}" for (plan, mode), number in by_mode.items())
    share = 100 * len(verdicts) / (2 * sum(all_of.values()))
    sampled = f"Looked at so far: {share:.1f} % of all, {looked_at}." if share < 100 else "All of them."
    lines = [INTRODUCTION, f"{sampled}\n", table(verdicts), "", *odd]
    return "\n".join(lines).rstrip() + "\n"


def read_record(record: Path) -> Iterator[Verdict]:
    for line in record.read_text().splitlines():
        read = json.loads(line)
        yield Verdict(**{**read, "codes": tuple(read["codes"])})
