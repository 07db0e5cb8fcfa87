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
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

import oracle
from alike import effect
from campaign_table import DOCUMENT, Verdict, read_record, report
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
MODES = {"TP": False, "SP": True}


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
    verdicts = list(read_record(arguments.record)) if arguments.record and arguments.record.exists() else []
    record = arguments.record.open("a") if arguments.record else None
    with LocalRanks(2) as ranks:
        if arguments.again:
            verdicts += again(ranks, arguments.again)
        verdicts += [read for record_file in arguments.records or () for read in read_record(record_file)]
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
