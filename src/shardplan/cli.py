"""``plan-compile``: print a compiled plan, or check plans and say so by the exit code.

Exit codes: 0 clean (warnings too, unless --strict), 1 the plan is wrong, 2 could not check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from shardplan.diagnostics import Diagnostic, PlanError, Severity
from shardplan.mesh import MeshSpec, parse_mesh

if TYPE_CHECKING:
    from rich.console import Console

    from shardplan.inventory import Inventory
    from shardplan.plan import Plan

Format = Literal["text", "json", "github"]

CLEAN, WRONG, COULD_NOT_CHECK = 0, 1, 2
COULD_NOT_CHECK_CODES = ("SP001", "SP901")  # a plan or a model that is not there says nothing about a plan


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plan is checked on: one model, one mesh, one mode."""

    model: str
    mesh: MeshSpec
    sequence_parallel: bool

    def __str__(self) -> str:
        return f"{self.model} {self.mesh} {'SP' if self.sequence_parallel else 'TP'}"


class Findings:
    """Findings in the order met, each once, with the situations in which it was met."""

    def __init__(self) -> None:
        self._met: dict[Diagnostic, list[str]] = {}

    def add(self, findings: Iterable[Diagnostic], situation: str = "") -> None:
        for finding in findings:
            self._met.setdefault(finding, []).append(situation)

    def __iter__(self) -> Iterator[tuple[Diagnostic, list[str]]]:
        return iter(self._met.items())

    def exit_code(self, *, strict: bool) -> int:
        refused = [d for d in self._met if d.severity is Severity.ERROR or (strict and d.severity is Severity.WARNING)]
        if any(finding.code not in COULD_NOT_CHECK_CODES for finding in refused):
            return WRONG
        return COULD_NOT_CHECK if refused else CLEAN


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("plans", nargs=-1, metavar="[PLAN]...")
@click.option(
    "--overlay", "overlays", multiple=True, metavar="FILE", help="A layer on top of each PLAN; may be repeated."
)
@click.option("--model", metavar="CONFIG", help="A reference model, a config.json, a folder with one, or module:Class.")
@click.option("--mesh", metavar="AXES", help="Axes and sizes: dp=2,tp=4.")
@click.option(
    "--sequence-parallel/--no-sequence-parallel", default=None, help="The mode; without it --check covers both."
)
@click.option("--check", is_flag=True, help="Only report what is wrong; quiet when clean.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a plan file.")
@click.option("--strict", is_flag=True, help="Let warnings fail too.")
@click.option(
    "--format", "format_", type=click.Choice(["text", "json", "github"]), default="text", help="Of the report."
)
@click.version_option(package_name="shardplan")
def command(
    plans: tuple[str, ...],
    overlays: tuple[str, ...],
    model: str | None,
    mesh: str | None,
    sequence_parallel: bool | None,
    check: bool,
    schema: bool,
    strict: bool,
    format_: Format,
) -> None:
    """Compile sharding PLANs (files or names of shipped plans; all shipped ones when none is given) and print them.

    Exit code 0: clean. 1: a plan is wrong. 2: could not check.
    """
    if schema:
        from shardplan.schema import plan_schema

        click.echo(json.dumps(plan_schema(), indent=2))
        return
    findings = Findings()
    named = plans or _shipped()
    if check:
        for plan in named:
            _check_one(plan, overlays, model, mesh, sequence_parallel, findings)
    else:
        reports = [_compile_one(plan, overlays, model, mesh, sequence_parallel, findings, format_) for plan in named]
        if format_ == "json":
            click.echo(json.dumps([report for report in reports if report is not None], indent=2))
    if check or format_ != "json":
        _print_findings(findings, format_)
    sys.exit(findings.exit_code(strict=strict))


def _shipped() -> Sequence[str]:
    from shardplan.resources import shipped_plans

    return tuple(shipped_plans())


# ---------------------------------------------------------------- check


def _check_one(
    name: str,
    overlays: tuple[str, ...],
    model: str | None,
    mesh: str | None,
    sequence_parallel: bool | None,
    findings: Findings,
) -> None:
    """Check one plan on every model, mesh and mode that it is to be checked on."""
    try:
        plan = _read(name, overlays)
        models, meshes = _wanted(plan, model, mesh)
    except PlanError as refused:
        findings.add(refused.diagnostics)
        return
    if not models or not meshes:
        findings.add([_file_only(plan, "a model" if not models else "a mesh")])
        return
    for situation, found in _checks(plan, models, meshes, sequence_parallel):
        findings.add(found, situation)


def _read(name: str, overlays: tuple[str, ...]) -> Plan:
    from shardplan.merge import read_plan

    return read_plan([name, *(Path(overlay) for overlay in overlays)])


def _wanted(plan: Plan, model: str | None, mesh: str | None) -> tuple[tuple[str, ...], tuple[MeshSpec, ...]]:
    meshes = (mesh,) if mesh else plan.reference.meshes
    return (model,) if model else plan.reference.models, tuple(map(parse_mesh, meshes))


def _checks(
    plan: Plan, models: Sequence[str], meshes: Sequence[MeshSpec], sequence_parallel: bool | None
) -> Iterator[tuple[str, tuple[Diagnostic, ...]]]:
    from shardplan.check import check
    from shardplan.checks.target import Target
    from shardplan.resolve import resolve

    for model in models:
        try:
            resolved = resolve(plan, _inventory(model))
        except PlanError as refused:
            yield model, refused.diagnostics
            continue
        for mode in _modes(plan, sequence_parallel):
            for mesh in meshes:
                yield str(Situation(model, mesh, mode)), check(Target(resolved, mesh, mode))


def _modes(plan: Plan, asked: bool | None) -> tuple[bool, ...]:
    """The mode that was asked for, or both. A plan without a word of the stream has only one."""
    if asked is not None:
        return (asked,)
    return (False, True) if plan.speaks_of_stream or plan.sequence_parallel else (False,)


def _inventory(model: str) -> Inventory:
    from shardplan.inventory import take_inventory
    from shardplan.references import build_meta_model

    return take_inventory(build_meta_model(model))


def _file_only(plan: Plan, missing: str) -> Diagnostic:
    return Diagnostic(
        "SP902",
        f"only the file of plan '{plan.name}' was checked: it names no {missing.removeprefix('a ')} and none was given",
        where=plan.where,
        subject=plan.name,
        expected="`reference: {models: [...], meshes: [...]}`",
        hint="pass --model and --mesh, or name them in the plan",
        severity=Severity.NOTE,
    )


# ---------------------------------------------------------------- compile


def _compile_one(
    name: str,
    overlays: tuple[str, ...],
    model: str | None,
    mesh: str | None,
    sequence_parallel: bool | None,
    findings: Findings,
    format_: Format,
) -> dict[str, object] | None:
    """Print one compiled plan, on the first model and mesh that it is for; return it as data for JSON."""
    from shardplan.check import check
    from shardplan.checks.target import Target
    from shardplan.diagnostics import errors
    from shardplan.lower import lower
    from shardplan.resolve import resolve

    try:
        plan = _read(name, overlays)
        models, meshes = _wanted(plan, model, mesh)
        if not models or not meshes:
            findings.add([_file_only(plan, "a model" if not models else "a mesh")])
            return None
        mode = bool(plan.sequence_parallel if sequence_parallel is None else sequence_parallel)
        target = Target(resolve(plan, _inventory(models[0])), meshes[0], mode)
    except PlanError as refused:
        findings.add(refused.diagnostics)
        return None
    found = check(target)
    findings.add(found, str(Situation(models[0], meshes[0], mode)))
    if errors(found):
        return None
    from shardplan.report import as_dict, make_report, print_report

    compiled = lower(target.resolved, target.mesh, sequence_parallel=mode)
    report = make_report(target.resolved, compiled)
    if format_ != "json":
        print_report(report, _console())
    return as_dict(report, compiled)


# ---------------------------------------------------------------- printing


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=200, no_color=True)


def _print_findings(findings: Findings, format_: Format) -> None:
    if format_ == "json":
        click.echo(json.dumps([_as_dict(finding, met) for finding, met in findings], indent=2))
        return
    for finding, situations in findings:
        click.echo(_github(finding) if format_ == "github" else _text(finding, situations))
    if format_ == "text" and (summary := _summary(findings)):
        click.echo(summary)


def _text(finding: Diagnostic, situations: list[str]) -> str:
    met = [situation for situation in situations if situation]
    more = f" and {len(met) - 1} more" if len(met) > 1 else ""
    return f"{finding}\n    on: {met[0]}{more}" if met else str(finding)


def _summary(findings: Findings) -> str:
    counts = {severity: sum(d.severity is severity for d, _ in findings) for severity in Severity}
    spoken = [f"{n} {s.value}{'s' if n > 1 else ''}" for s, n in counts.items() if n and s is not Severity.NOTE]
    return ", ".join(spoken)


def _github(finding: Diagnostic) -> str:
    """A workflow command, which GitHub shows at the line: properties and message have escapes of their own."""
    level = {Severity.NOTE: "notice"}.get(finding.severity, finding.severity.value)
    where = finding.where
    place = f" file={_escaped(where.file, ':,')},line={where.line or 1},col={where.column or 1}" if where else ""
    message = f"{finding.code}: {finding.message}" + (f" Hint: {finding.hint}" if finding.hint else "")
    return f"::{level}{place}::{_escaped(message)}"


def _escaped(text: str, also: str = "") -> str:
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + also else c for c in text)


def _as_dict(finding: Diagnostic, situations: list[str]) -> dict[str, object]:
    where = finding.where
    place = {"file": where.file, "line": where.line, "column": where.column} if where else None
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "message": finding.message,
        "where": place,
        "subject": finding.subject,
        "expected": finding.expected,
        "hint": finding.hint,
        "on": [situation for situation in situations if situation],
    }


def main() -> None:
    """The console script. Whatever we did not foresee is our fault, not the plan's: exit code 2."""
    try:
        command()
    except Exception as crash:  # noqa: BLE001 - the one place where a crash becomes an exit code
        import traceback

        traceback.print_exc()
        click.echo(
            f"plan-compile failed on its own account: {type(crash).__name__}; please report the lines above", err=True
        )
        sys.exit(COULD_NOT_CHECK)
