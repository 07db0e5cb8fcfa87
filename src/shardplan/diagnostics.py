"""What can be wrong with a plan, as data: findings with a stable code, a place, an expectation and a way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How much a finding weighs: an ERROR refuses the plan, a WARNING does so under ``--strict``, a NOTE never does."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A place in a file; lines and columns count from 1. ``line`` 0 means the file as a whole."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        numbers = (str(number) for number in (self.line, self.column) if number)
        return ":".join((self.file, *numbers))


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding.

    Attributes:
        code: stable identifier, a key of ``CODES``.
        message: what is wrong, in one sentence, with the names and numbers involved.
        where: the plan line that caused it, when one did.
        subject: the module, parameter, pattern or key that the finding is about.
        expected: what would have been right.
        hint: what to do.
        severity: defaults to ERROR.
    """

    code: str
    message: str
    where: Location | None = None
    subject: str = ""
    expected: str = ""
    hint: str = ""
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        assert self.code in CODES, f"{self.code} is not in CODES"

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        lines = [f"{place}{self.severity.value} {self.code}: {self.message}"]
        lines += [f"    expected: {self.expected}"] if self.expected else []
        lines += [f"    hint: {self.hint}"] if self.hint else []
        return "\n".join(lines)


class PlanError(ValueError):
    """A plan, model or mesh that is refused. ``diagnostics`` holds every finding, not only the first."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(str(diagnostic) for diagnostic in self.diagnostics))


def errors(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The findings that refuse a plan."""
    return tuple(d for d in diagnostics if d.severity is Severity.ERROR)


# Codes are stable: a retired number is never used again. docs/diagnostics.md shows a broken plan for each.
CODES = {
    # the file
    "SP001": "the plan file cannot be read",
    "SP002": "not valid YAML",
    "SP003": "a special character starts an unquoted key or value",
    "SP004": "duplicate key",
    "SP005": "a key that YAML reads as a number, a boolean or null",
    "SP006": "a key without a value",
    "SP007": "unknown key",
    "SP008": "wrong type or value",
    "SP009": "a pattern that cannot be parsed",
    "SP010": "a layout or conversion that cannot be parsed",
    "SP011": "layers that cannot be found or that go round in a circle",
    "SP012": "a file that holds no plan",
    # the plan against the model
    "SP101": "unknown style",
    "SP102": "a rule that matches nothing",
    "SP103": "two rules of equal rank claim one module",
    "SP104": "a parameter that no rule claims",
    "SP105": "a style that does not fit the module",
    "SP106": "the plan is for other architectures",
    "SP107": "no root of the plan exists in the model",
    "SP108": "a pattern of fsdp or recompute that matches nothing",
    "SP109": "FSDP2 units that cannot be wrapped as written",
    "SP110": "a rule that does nothing",
    "SP111": "FSDP2 units that gather more than they need",
    # the plan against the mesh and the layouts
    "SP201": "heads or groups that tp does not divide",
    "SP202": "a dim that tp cannot cut",
    "SP203": "an incomplete group of sibling projections",
    "SP204": "edges that do not meet",
    "SP205": "tied parameters with different placements",
    "SP206": "a parameter whose gradient would be wrong where it stands",
    "SP207": "one activation sent more often than needed",
    "SP208": "a whole parameter that covers cut heads or features",
    "SP209": "dropout over tp ranks",
    "SP210": "attention that counts heads by an attribute",
    "SP211": "a large weight or activation left whole",
    "SP212": "logits both sharded and gathered",
    "SP213": "gradients added up in half precision",
    "SP214": "sections or local sizes that do not fit their module",
    "SP215": "KV heads replicated within tp",
    # the mesh and the call
    "SP301": "a mesh that cannot be used",
    "SP302": "the model already has a plan applied",
    "SP303": "ranks that disagree",
    "SP304": "an option that needs something the mesh or the model lacks",
    "SP305": "the lock does not hold",
    # what a run shows
    "SP401": "a forward or backward that raises under the plan",
    "SP402": "a step that sends otherwise than the compiled plan says",
    "SP403": "a forward that departs from the unsharded model",
    "SP404": "gradients or parameters that depart from the unsharded model",
    # could not check
    "SP901": "the model cannot be found or built",
    "SP902": "only the file was checked",
    "SP903": "the model cannot be verified here",
    "SP904": "the model cannot be run dry here",
}
