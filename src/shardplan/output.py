"""What ``plan-compile --format json`` prints, for each thing that it can be asked: the source of its schema."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.diff import Difference
from shardplan.explain import ExplainedName
from shardplan.findings import Finding
from shardplan.report import FullReport


@dataclass(frozen=True, slots=True)
class Checked:
    """``--check`` and ``--lock``: the findings alone. No errors among them means exit code 0."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Compiled(Checked):
    """Without an option: every plan that is not refused."""

    plans: tuple[FullReport, ...]


@dataclass(frozen=True, slots=True)
class Explained(Checked):
    """``--explain``."""

    explanations: tuple[ExplainedName, ...]


@dataclass(frozen=True, slots=True)
class Compared(Checked):
    """``--diff``."""

    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """A plan on a shrunk model; ``mesh`` is that of the processes."""

    plan: str
    on: str
    holds: bool
    mesh: str
    shrunk: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Verified(Checked):
    """``--verify``."""

    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True)
class SentRow:
    """Calls of one collective at modules of one kind. Bytes are what a rank puts in; ``module`` "" is the model."""

    purpose: str
    module: str
    direction: str
    name: str
    modules: int
    calls: int
    nbytes_per_call: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Calls and bytes of one step."""

    calls: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Matrix products and attention of one forward, unsharded and on one rank, and the share of it that tp divides."""

    flops: int
    flops_per_rank: int
    sharded_percent: float


@dataclass(frozen=True, slots=True)
class DryRun:
    """One step of ``length`` tokens a rank; totals over tp, of FSDP2, and of the loss."""

    plan: str
    on: str
    length: int
    collectives: tuple[SentRow, ...]
    totals: dict[str, Sent]
    forward: Forward


@dataclass(frozen=True, slots=True)
class DryRan(Checked):
    """``--dry-run``."""

    dry_runs: tuple[DryRun, ...]


Output = Checked | Compiled | Explained | Compared | Verified | DryRan
