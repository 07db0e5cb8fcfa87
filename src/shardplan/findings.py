"""What a run of ``plan-compile`` found: collected, counted, printed, and turned into an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardplan.diagnostics import Diagnostic, Location, Severity

CLEAN, WRONG, COULD_NOT_CHECK = 0, 1, 2
# A plan, mesh or model that cannot be had, or a run that cannot be made, says nothing of a plan.
NAMED_BY_PLANS = ("SP301", "SP901")
COULD_NOT_CHECK_CODES = ("SP001", "SP301", "SP901", "SP903", "SP904")


@dataclass(frozen=True, slots=True)
class Asked:
    """The plan that was asked about: as the command line names it, its file, and the line that brings in others."""

    name: str
    file: str
    extends: Location


Paint = Callable[[str, Severity], str]


def _plain(text: str, _severity: Severity) -> str:
    return text


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnostic for programs, and the situations (model, mesh, mode) in which it was met.

    ``where.line`` and ``column`` are 0 where the file as a whole is meant.
    """

    code: str
    severity: str
    message: str
    where: Location | None
    subject: str
    expected: str
    hint: str
    on: tuple[str, ...]


class Findings:
    """Findings in the order met, each once, with the situations (model, mesh, mode) in which it was met.

    Where a finding lies in another file than the plan that was asked about, its situations name that plan, too.
    """

    def __init__(self) -> None:
        self._met: dict[Diagnostic, list[str]] = {}
        self._inherited: dict[Diagnostic, dict[Asked, None]] = {}  # by which plans

    def add(self, findings: Iterable[Diagnostic], situation: str = "", asked: Asked | None = None) -> None:
        for finding in findings:
            met = self._met.setdefault(finding, [])
            if asked and finding.where and finding.where.file != asked.file:
                self._inherited.setdefault(finding, {})[asked] = None
                met += [f"{situation} (plan {asked.name})"] if situation else []
            else:
                met += [situation] if situation else []

    def __iter__(self) -> Iterator[tuple[Diagnostic, list[str]]]:
        return iter(self._met.items())

    def exit_code(self, *, strict: bool) -> int:
        """CLEAN, WRONG or COULD_NOT_CHECK; a plan that is wrong outweighs another that could not be checked."""
        refused = [d for d in self._met if d.severity is Severity.ERROR or (strict and d.severity is Severity.WARNING)]
        if any(not _could_not_check(finding) for finding in refused):
            return WRONG
        return COULD_NOT_CHECK if refused else CLEAN

    def text(self, paint: Paint = _plain) -> Iterator[str]:
        """For people: each finding, then how many there are of each severity, in the colours of ``paint``."""
        for finding, situations in self:
            said, head = str(finding), f"{finding.severity.value} {finding.code}:"
            said = said.replace(head, paint(head, finding.severity), 1)
            yield f"{said}\n    on: {_situations(situations)}" if situations else said
        counts = {severity: sum(finding.severity is severity for finding in self._met) for severity in Severity}
        summary = [paint(f"{n} {s.value}{'s' * (n > 1)}", s) for s, n in counts.items() if n and s is not Severity.NOTE]
        if summary:
            yield ", ".join(summary)

    def github(self) -> Iterator[str]:
        """Workflow commands, which GitHub shows at the line.

        It cannot show one in a file outside the repository, such as an installed plan: then at what brings that in.
        """
        for finding in self._met:
            plans = self._inherited.get(finding, {}) if finding.where and _is_outside(finding.where.file) else {}
            yield from (_github(finding, asked.extends) for asked in plans)
            if not plans:
                yield _github(finding, finding.where)

    def data(self) -> list[dict[str, Any]]:
        """For programs."""
        return [asdict(_for_programs(finding, situations)) for finding, situations in self]


def _could_not_check(finding: Diagnostic) -> bool:
    """A mesh or model that a plan file names, with its place, is the plan's fault; on the command line it is usage."""
    return finding.code in COULD_NOT_CHECK_CODES and not (finding.code in NAMED_BY_PLANS and finding.where)


def _situations(met: list[str]) -> str:
    return f"{met[0]} and {len(met) - 1} more" if len(met) > 1 else met[0]


def _is_outside(file: str) -> bool:
    """Whether a file lies outside the working directory, which in a workflow is the repository, or was installed."""
    path = Path(file).resolve()
    return not path.is_relative_to(Path.cwd()) or "site-packages" in path.parts


def _github(finding: Diagnostic, where: Location | None) -> str:
    """Properties and message have escapes of their own."""
    level = {Severity.NOTE: "notice"}.get(finding.severity, finding.severity.value)
    place = f" file={_escaped(where.file, ':,')},line={where.line or 1},col={where.column or 1}" if where else ""
    parts = [f"{finding.code}: {finding.message}"]
    parts += [f"written at: {finding.where}"] if where != finding.where else []
    parts += [f"expected: {finding.expected}"] if finding.expected else []
    parts += [f"hint: {finding.hint}"] if finding.hint else []
    return f"::{level}{place}::{_escaped(chr(10).join(parts))}"


def _escaped(text: str, also: str = "") -> str:
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + also else c for c in text)


def _for_programs(of: Diagnostic, on: list[str]) -> Finding:
    return Finding(of.code, of.severity.value, of.message, of.where, of.subject, of.expected, of.hint, tuple(on))
