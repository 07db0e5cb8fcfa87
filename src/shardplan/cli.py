"""``plan-compile``: print a compiled plan, or check plans and say so by the exit code.

Exit codes: 0 clean (warnings too, unless --strict), 1 the plan is wrong, 2 could not check.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from shardplan.diagnostics import Diagnostic, PlanError, Severity, errors
from shardplan.findings import COULD_NOT_CHECK, Findings
from shardplan.mesh import MeshSpec, parse_mesh
from shardplan.styles import Style, known_styles

if TYPE_CHECKING:
    from shardplan.inventory import Inventory
    from shardplan.plan import Plan

Format = Literal["text", "json", "github"]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks of each plan; None leaves a question to the plan."""

    overlays: tuple[str, ...]
    model: str | None
    mesh: str | None
    sequence_parallel: bool | None
    styles: Mapping[str, Style]

    def plan(self, name: str) -> Plan:
        from shardplan.merge import read_plan

        return read_plan([name, *(Path(overlay) for overlay in self.overlays)])

    def models(self, plan: Plan) -> tuple[str, ...]:
        return (self.model,) if self.model is not None else plan.reference.models

    def meshes(self, plan: Plan) -> tuple[MeshSpec, ...]:
        return tuple(map(parse_mesh, (self.mesh,) if self.mesh is not None else plan.reference.meshes))

    def modes(self, plan: Plan) -> tuple[bool, ...]:
        """The mode that was asked for, or both. A plan without a word of the stream has only one."""
        if self.sequence_parallel is not None:
            return (self.sequence_parallel,)
        return (False, True) if plan.speaks_of_stream or plan.sequence_parallel else (False,)

    def mode(self, plan: Plan) -> bool:
        return bool(plan.sequence_parallel if self.sequence_parallel is None else self.sequence_parallel)


def _own_styles(_context: click.Context, _option: click.Parameter, module: str | None) -> Mapping[str, Style]:
    """The table of styles with those of a user's module, found like ``python -m`` would."""
    if module is None:
        return known_styles()
    try:
        return known_styles(import_module(module).STYLES)
    except ImportError as error:
        raise click.BadParameter(f"cannot import '{module}': {error}") from None
    except AttributeError:
        raise click.BadParameter(f"'{module}' has no STYLES, a dict of names to styles") from None


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
@click.option(
    "--styles", "own_styles", metavar="MODULE", callback=_own_styles, help="A Python module with your own STYLES."
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
    own_styles: Mapping[str, Style],
    check: bool,
    schema: bool,
    strict: bool,
    format_: Format,
) -> None:
    """Compile sharding PLANs (files or names of shipped plans; all shipped ones when none is given) and print them.

    Exit code 0: clean. 1: a plan is wrong. 2: could not check.
    """
    if schema:
        from shardplan.schema import plan_schema_text

        click.echo(plan_schema_text(), nl=False)
        return
    request, findings = Request(overlays, model, mesh, sequence_parallel, own_styles), Findings()
    compiled: list[dict[str, Any]] = []
    for plan in plans or _shipped():
        if check:
            _check(plan, request, findings)
        else:
            compiled += _compile(plan, request, findings, printing=format_ != "json")
    if format_ == "json":
        click.echo(json.dumps({"findings": findings.data(), **({} if check else {"plans": compiled})}, indent=2))
    else:
        for line in findings.github() if format_ == "github" else findings.text():
            click.echo(line)
    sys.exit(findings.exit_code(strict=strict))


def _shipped() -> Sequence[str]:
    from shardplan.resources import shipped_plans

    return tuple(shipped_plans())


# ---------------------------------------------------------------- check


def _check(name: str, request: Request, findings: Findings) -> None:
    """Check one plan on every model, mesh and mode that it is to be checked on."""
    try:
        plan = request.plan(name)
        models, meshes = request.models(plan), request.meshes(plan)
    except PlanError as refused:
        findings.add(refused.diagnostics)
        return
    if not models or not meshes:
        findings.add(_file_only(plan, request.styles, missing="mesh" if models else "model"))
        return
    for situation, found in _situations(plan, request, models, meshes):
        findings.add(found, situation)


def _situations(
    plan: Plan, request: Request, models: Sequence[str], meshes: Sequence[MeshSpec]
) -> Iterator[tuple[str, tuple[Diagnostic, ...]]]:
    """Every situation by name, with what is found in it."""
    from shardplan.check import check
    from shardplan.checks.target import Target
    from shardplan.resolve import resolve

    for model in models:
        try:
            resolved = resolve(plan, _inventory(model), request.styles)
        except PlanError as refused:
            yield "", refused.diagnostics
            continue
        for mode in request.modes(plan):
            for mesh in meshes:
                yield f"{model} {mesh} {'SP' if mode else 'TP'}", check(Target(resolved, mesh, mode))


@lru_cache(maxsize=8)  # several plans on one model
def _inventory(model: str) -> Inventory:
    from shardplan.inventory import take_inventory
    from shardplan.references import build_meta_model

    return take_inventory(build_meta_model(model))


def _file_only(plan: Plan, styles: Mapping[str, Style], missing: str) -> Iterator[Diagnostic]:
    """All that can be said of a plan without a model: unknown styles, and that there is more to check."""
    from shardplan.checks.faulty import unknown_styles

    yield from unknown_styles(plan.rules, styles)
    yield Diagnostic(
        "SP902",
        f"only the file was checked: plan '{plan.name}' names no {missing} under `reference`, and none was given",
        where=plan.where,
        subject=plan.name,
        expected="`reference: {models: [...], meshes: [...]}`",
        hint="pass --model and --mesh, or name them in the plan",
        severity=Severity.NOTE,
    )


# ---------------------------------------------------------------- compile


def _compile(name: str, request: Request, findings: Findings, *, printing: bool) -> Iterator[dict[str, Any]]:
    """Compile one plan on the first model and mesh that it is for; print it, and give it as data."""
    from shardplan.check import check
    from shardplan.checks.target import Target
    from shardplan.lower import lower
    from shardplan.report import as_dict, make_report
    from shardplan.resolve import resolve
    from shardplan.tables import report_text

    try:
        plan = request.plan(name)
        models, meshes, mode = request.models(plan), request.meshes(plan), request.mode(plan)
        if not models or not meshes:
            findings.add(_file_only(plan, request.styles, missing="mesh" if models else "model"))
            return
        target = Target(resolve(plan, _inventory(models[0]), request.styles), meshes[0], mode)
    except PlanError as refused:
        findings.add(refused.diagnostics)
        return
    found = check(target)
    findings.add(found, f"{models[0]} {meshes[0]} {'SP' if mode else 'TP'}")
    if errors(found):
        return
    compiled = lower(target.resolved, target.mesh, sequence_parallel=mode)
    report = make_report(target.resolved, compiled)
    if printing:
        click.echo(report_text(report, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    yield as_dict(report, compiled)


def main() -> None:
    """The console script. Whatever we did not foresee is our fault, not the plan's: exit code 2."""
    sys.path.insert(0, "")  # --model and --styles find modules of the working directory
    try:
        command()
    except Exception as crash:  # noqa: BLE001 - the one place where a crash becomes an exit code
        import traceback

        traceback.print_exc()
        click.echo(
            f"plan-compile failed on its own account: {type(crash).__name__}; please report the lines above", err=True
        )
        sys.exit(COULD_NOT_CHECK)
