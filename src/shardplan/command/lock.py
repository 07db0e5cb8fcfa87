"""``plan-compile --lock FILE``: write down what plans come to; with ``--check``, see that it still is so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardplan.command.answer import compile_situation
from shardplan.command.request import Request, Situation
from shardplan.diagnostics import Diagnostic, Location, PlanError, errors
from shardplan.findings import Findings

if TYPE_CHECKING:
    from shardplan.lock import Broken, Locked


class Locker:
    """One lock file, for all plans of a command.

    Raises:
        click.BadParameter: the file cannot be read or written, or is no lock.
    """

    def __init__(self, file: str, *, checking: bool) -> None:
        self._file = Path(file)
        self._locked = self._read() if checking else None
        self._now: list[Locked] = []

    def lock_one(self, name: str, request: Request, findings: Findings) -> None:
        """Check and compile one plan in every situation, and compare it with what is locked."""
        try:
            plan = request.plan(name)
            if request.missing(plan):
                raise click.UsageError(
                    f"--lock needs a model and a mesh, and {name} names none: pass --model and --mesh"
                )
            key = self._key(name, request)
            now, whole = [], True
            for situation in request.situations(name, plan):
                locked = self._compile(key, situation, findings)
                whole = whole and locked is not None
                now += [locked] if locked else []
        except PlanError as refused:
            findings.add(refused.diagnostics)
            return
        self._now += now
        if self._locked is not None:
            narrowed = not whole or bool(request.model or request.mesh) or request.sequence_parallel is not None
            self._compare(key, now, plan.where, findings, narrowed=narrowed)

    def write(self, findings: Findings) -> None:
        """Write the lock, where that was asked for and no plan is refused."""
        from shardplan.lock import lock_text

        if self._locked is None and not errors(finding for finding, _ in findings):
            try:
                self._file.write_text(lock_text(self._now), encoding="utf-8")
            except OSError as error:
                raise self._refusal("written", error) from None

    def _compile(self, key: str, situation: Situation | PlanError, findings: Findings) -> Locked | None:
        from shardplan.lock import Locked

        if isinstance(situation, PlanError):
            findings.add(situation.diagnostics)
            return None
        compiled, target = compile_situation(situation, findings).plan, situation.target
        if compiled is None:
            return None
        return Locked.of(key, self._portable(situation.model), compiled, sequence_parallel=target.sequence_parallel)

    def _compare(self, key: str, now: list[Locked], where: Location, findings: Findings, *, narrowed: bool) -> None:
        from shardplan.lock import broken

        locked = [entry for entry in self._locked or () if entry.plan == key]
        if not locked and now:
            findings.add([self._finding(f"plan '{key}' is not in the lock {self._file}", where, key)])
            return
        for entry in broken(locked, now, narrowed=narrowed):
            findings.add(self._findings(entry, where), entry.situation if entry.changes else "")

    def _findings(self, entry: Broken, where: Location) -> Iterator[Diagnostic]:
        if entry.kind == "not locked":
            yield self._finding(f"{entry.situation} is not in the lock {self._file}", where, entry.situation)
        elif entry.kind == "no longer checked":
            message = f"{entry.situation} is in the lock {self._file}, and no longer among the plan's references"
            yield self._finding(message, where, entry.situation)
        for change in entry.changes:
            section = change.section.replace("_", " ")
            yield self._finding(f"the lock {self._file} does not hold for {section}: {change}", where, change.names)

    def _finding(self, message: str, where: Location, subject: str) -> Diagnostic:
        return Diagnostic(
            "SP305",
            message,
            where=where,
            subject=subject,
            hint="undo the change; or, if it is meant, write the lock anew (without --check) and review the difference",
        )

    # ---------------------------------------------------------------- files

    def _read(self) -> tuple[Locked, ...]:
        from shardplan.lock import read_lock

        try:
            return read_lock(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._refusal("read", error, "; without --check, --lock writes one") from None

    def _refusal(self, done: str, error: Exception, way_out: str = "") -> click.BadParameter:
        reason = error.strerror if isinstance(error, OSError) else error
        return click.BadParameter(f"'{self._file}' cannot be {done}: {reason}{way_out}", param_hint="--lock")

    def _key(self, name: str, request: Request) -> str:
        return " + ".join(map(self._portable, (name, *request.overlays)))

    def _portable(self, name: str) -> str:
        """A file as it is found from the lock's folder, whichever folder the command runs in; other names as given."""
        if not Path(name).exists():
            return name
        return Path(os.path.relpath(name, self._file.parent)).as_posix()
