"""The checker put to the test: how many mutants of the shipped plans each rung of the ladder catches.

``python tests/campaign.py`` (``make campaign``) derives every single mutation of every shipped plan, lets the oracle
decide in both modes what each really does, and asks ``--check``, and of what that lets pass ``--dry-run`` and
``--verify``. It takes hours: ``--sample N`` looks at every N-th mutant only, from number ``--first`` on,
``--matching TEXT`` at those that have it in them, and ``--record FILE`` goes on where the file ends. ``--write`` writes
docs/campaign.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

import oracle
from alike import effect
from mutants import Mutant, mutants
from oracle import Seen
from pool import Pool, PoolError
from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.command.request import inventory_of, model_of
from shardplan.diagnostics import Diagnostic, PlanError, Severity, errors
from shardplan.dry_run.run import dry_run
from shardplan.inventory import take_inventory
from shardplan.lower import lower
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.references import build_meta_model
from shardplan.resolve import resolve
from shardplan.resources import shipped_plans
from shardplan.verify.prove import make_subject, prove
from shardplan.verify.ranks import LocalRanks, Ranks

REAL = {  # what the checks look at: together they have every kind of module that the plan speaks of
    "llama": ("real_models:llama",),
    "qwen2": ("real_models:qwen2",),
    "gemma3": ("real_models:gemma3",),
    "phi3": ("real_models:phi3",),
    "gpt2": ("real_models:gpt2",),
    "nemotron_h": ("real_models:nemotron_h", "real_models:nemotron_h_with_latent_experts"),
}
REAL_MESHES = {"phi3": "dp=2,tp=2"}  # Phi-4 has 10 KV heads
REAL_MESH = "dp=2,tp=4"
CHUNK = 24
DOCUMENT = Path(__file__).parents[1] / "docs" / "campaign.md"
MODES = {"TP": False, "SP": True}


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


def judge(
    pool: Pool, ranks: Ranks, plan: str, chosen: list[Mutant], known: Container[tuple[str, str]] = ()
) -> Iterator[Verdict]:
    """Verdicts of the mutants of one plan, but for ``known`` ones: text and mode."""
    for mode, sequence_parallel in MODES.items():
        due = [mutant for mutant in chosen if (mutant.text, mode) not in known]
        if not due:
            continue
        (base,) = seen_by_oracle(pool, [as_shipped(plan)], sequence_parallel)
        assert not base.wrong, base
        for start in range(0, len(due), CHUNK):
            chunk = due[start : start + CHUNK]
            for mutant, seen in zip(chunk, seen_by_oracle(pool, chunk, sequence_parallel), strict=True):
                truth, reason = classify(seen, base)
                yield _asked(ranks, mutant, mode, truth, reason)


def classify(seen: Seen, base: Seen) -> tuple[str, str]:
    if seen.wrong:
        return "wrong", seen.wrong
    assert seen.cost is not None
    assert base.cost is not None
    waste = seen.cost.wastes(base.cost)
    if waste or seen.idle:
        return "wasteful", waste or "the written rule does nothing"
    return "harmless", ""


def seen_by_oracle(pool: Pool, chunk: list[Mutant], sequence_parallel: bool) -> list[Seen]:
    """What rank 0 saw, and what is wrong on any rank; a chunk that hangs is looked at by halves."""
    try:
        by_rank = pool.run(4, oracle.look, chunk, sequence_parallel, timeout=60.0 + 5 * len(chunk))
    except PoolError as error:
        if len(chunk) == 1:
            return [Seen(f"hangs or dies: {str(error).splitlines()[0]}", None, False)]
        halves = chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]
        return [seen for half in halves for seen in seen_by_oracle(pool, half, sequence_parallel)]
    together = []
    for per_rank in zip(*by_rank, strict=True):
        wrong = next((seen.wrong for seen in per_rank if seen.wrong), "")
        together.append(Seen(wrong, per_rank[0].cost, per_rank[0].idle))
    return together


def again(ranks: Ranks, record: Path) -> Iterator[Verdict]:
    """Verdicts of an earlier run with the checks asked anew; what the oracle saw does not depend on them."""
    known = {(m.plan, m.text): m for plan in shipped_plans() for m in mutants(plan)}
    for line in record.read_text().splitlines():
        old = json.loads(line)
        mutant = known[old["plan"], old["text"]]
        proof = (old["raised"], old["verified"]) if old["verified"] is not None else None
        yield _asked(ranks, mutant, old["mode"], old["truth"], old["reason"], proof)


def _asked(
    ranks: Ranks, mutant: Mutant, mode: str, truth: str, reason: str, known: tuple[bool, bool] | None = None
) -> Verdict:
    """Ask the checks, and where they let a mutant pass the dry run and the proof, unless that is known."""
    looked = [_checked(mutant, model, MODES[mode]) for model in REAL[mutant.plan]]
    shipped = _of_plan(mutant.plan, MODES[mode])
    findings = [finding for found, _ in looked for finding in found if _said(finding) not in shipped]
    refused = bool(errors(findings))
    raised, verified = (None, None) if refused else known or _run(ranks, mutant, [target for _, target in looked])
    named = any(finding.severity is not Severity.NOTE for finding in findings)
    codes = tuple(dict.fromkeys(finding.code for finding in findings))
    return Verdict(mutant.plan, mutant.kind, mutant.text, mode, truth, reason, refused, named, codes, raised, verified)


def _run(ranks: Ranks, mutant: Mutant, targets: list[Target | None]) -> tuple[bool, bool]:
    """Whether the dry run and the proof refuse, on some model, what the checks let pass."""
    run = [(model, target) for model, target in zip(REAL[mutant.plan], targets, strict=True) if target is not None]
    raised = any(_raises(model, target) for model, target in run)
    return raised, any(_refuted(model, target, ranks) for model, target in run)


_KNOWN: dict[object, bool] = {}  # of what was run: mutants with one effect are run once


def _once(key: object, compute: Callable[[], bool]) -> bool:
    if key not in _KNOWN:
        _KNOWN[key] = compute()
    return _KNOWN[key]


def _raises(model: str, target: Target) -> bool:
    compiled = lower(target.resolved, target.mesh, sequence_parallel=target.sequence_parallel)
    return _once(("dry run", model, effect(compiled)), lambda: bool(dry_run(target, build_meta_model(model)).findings))


def _refuted(model: str, target: Target, ranks: Ranks) -> bool:
    subject = make_subject(model_of(model), target, ranks.size)
    with torch.device("meta"):
        small = resolve(target.resolved.plan, take_inventory(subject.build()), target.resolved.styles)
    compiled = lower(small, subject.mesh, sequence_parallel=target.sequence_parallel)
    key = "proof", model, repr(subject.changes), effect(compiled)
    return _once(key, lambda: bool(prove(target, subject, ranks)))


def as_shipped(plan: str) -> Mutant:
    return Mutant(plan, "none", "as shipped", shipped_plans()[plan].read_text())


@cache
def _of_plan(plan: str, sequence_parallel: bool) -> frozenset[tuple[str, str]]:
    """What is said of the plan as it is shipped, and so nothing about a mutation."""
    looked = [_checked(as_shipped(plan), model, sequence_parallel) for model in REAL[plan]]
    return frozenset(_said(finding) for found, _ in looked for finding in found)


def _said(finding: Diagnostic) -> tuple[str, str]:
    return finding.code, finding.message


def _checked(mutant: Mutant, model: str, sequence_parallel: bool) -> tuple[tuple[Diagnostic, ...], Target | None]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(mutant.source)
        try:
            resolved = resolve(read_plan(path), inventory_of(model))
        except PlanError as refused:
            return refused.diagnostics, None
    target = Target(resolved, parse_mesh(REAL_MESHES.get(mutant.plan, REAL_MESH)), sequence_parallel)
    return check(target), target


# ---------------------------------------------------------------- the table

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
    sampled = f"A sample, {share:.1f} % of all, every so many of them: {looked_at}." if share < 100 else "All of them."
    lines = [INTRODUCTION, f"{sampled}\n", table(verdicts), "", *odd]
    return "\n".join(lines).rstrip() + "\n"


def _recorded(record: Path) -> Iterator[Verdict]:
    for line in record.read_text().splitlines():
        read = json.loads(line)
        yield Verdict(**{**read, "codes": tuple(read["codes"])})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=1, help="look at every N-th mutant")
    parser.add_argument("--first", type=int, default=0, help="the first mutant to look at")
    parser.add_argument("--matching", default="", help="look at mutants with this text in their descriptions only")
    parser.add_argument("--plan", action="append")
    parser.add_argument("--records", type=Path, nargs="+", help="verdicts of earlier runs, for one table")
    parser.add_argument("--again", type=Path, help="a record, of which only the checks are asked anew")
    parser.add_argument("--record", type=Path, help="a file for the verdicts, a JSON object a line; what it has stays")
    parser.add_argument("--write", action="store_true", help="write docs/campaign.md")
    arguments = parser.parse_args()
    pool, start = Pool(), time.monotonic()
    verdicts = list(_recorded(arguments.record)) if arguments.record and arguments.record.exists() else []
    record = arguments.record.open("a") if arguments.record else None
    with LocalRanks(2) as ranks:
        if arguments.again:
            verdicts += again(ranks, arguments.again)
        verdicts += [read for record_file in arguments.records or () for read in _recorded(record_file)]
        for plan in () if arguments.again or arguments.records else arguments.plan or shipped_plans():
            matching = [mutant for mutant in mutants(plan) if arguments.matching in mutant.text]
            chosen = matching[arguments.first :: arguments.sample]
            known = {(verdict.text, verdict.mode) for verdict in verdicts if verdict.plan == plan}
            print(f"{plan}: {len(chosen)} mutants", file=sys.stderr)
            for number, verdict in enumerate(judge(pool, ranks, plan, chosen, known)):
                verdicts.append(verdict)
                if record:
                    print(json.dumps(asdict(verdict)), file=record, flush=True)
                if number % 100 == 0:
                    print(f"  {number}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    pool.close()
    text = report(verdicts)
    print(text)
    if arguments.write:
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
