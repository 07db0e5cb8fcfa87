"""``plan-compile``: print a compiled plan, or check plans and say so by the exit code.

Exit codes: 0 clean (warnings too, unless --strict), 1 the plan is wrong, 2 could not check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import click

from shardplan.command.check import check_one
from shardplan.command.colour import paint
from shardplan.command.compile import compile_one
from shardplan.command.diff import diff_one
from shardplan.command.dry_run import dry_run_one
from shardplan.command.explain import explain_one
from shardplan.command.init import init as init_plan
from shardplan.command.lock import Locker
from shardplan.command.request import Request
from shardplan.command.verify import Verifier
from shardplan.findings import COULD_NOT_CHECK, Findings
from shardplan.styles import Style, known_styles

Format = Literal["text", "json", "github"]


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


def _not_empty(_context: click.Context, _option: click.Parameter, given: Any) -> Any:
    """An unset variable in a CI job must not switch off what it was to name."""
    if given == "" or (isinstance(given, tuple) and "" in given):
        raise click.BadParameter("it is empty")
    return given


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
@click.option("--dry-run", is_flag=True, help="Check, then run a step of the real-size model, and count what is sent.")
@click.option("--verify", is_flag=True, help="Check, then prove by numbers on local processes.")
@click.option(
    "--processes", type=click.IntRange(2, 16), default=2, show_default=True, help="How many of them --verify starts."
)
@click.option(
    "--explain",
    multiple=True,
    metavar="NAME",
    callback=_not_empty,
    help="What is said of a module or parameter, and why.",
)
@click.option(
    "--diff",
    metavar="OTHER",
    callback=_not_empty,
    help="What changes with another plan, mode=tp or mode=sp, or mesh=AXES.",
)
@click.option(
    "--lock",
    metavar="FILE",
    callback=_not_empty,
    help="Write what PLANs come to; with --check, fail where it is not so.",
)
@click.option(
    "--schema",
    type=click.Choice(["plan", "report"]),
    is_flag=False,
    flag_value="plan",
    help="Print the JSON Schema of a plan file, or of the report.",
)
@click.option("--init", is_flag=True, help="Print a plan to start from: for --model, or of a Python dict (--from).")
@click.option("--from", "source", metavar="MODULE:NAME", callback=_not_empty, help="The dict that --init reads.")
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
    dry_run: bool,
    verify: bool,
    processes: int,
    explain: tuple[str, ...],
    diff: str | None,
    lock: str | None,
    schema: str | None,
    init: bool,
    source: str | None,
    strict: bool,
    format_: Format,
) -> None:
    """Compile sharding PLANs (files or names of shipped plans; all shipped ones when none is given) and print them.

    Exit code 0: clean. 1: a plan is wrong. 2: could not check.
    """
    if schema:
        from shardplan.schema import plan_schema_text, report_schema_text

        click.echo(plan_schema_text() if schema == "plan" else report_schema_text(), nl=False)
        return
    kind = _one_question(check, verify=verify, dry_run=dry_run, explain=explain, diff=diff, lock=lock)
    request, findings = Request(overlays, model, mesh, sequence_parallel, own_styles), Findings()
    if init:
        init_plan(model, source, findings)
        plans = ()
    answers: list[dict[str, Any]] = []
    verifier = Verifier(processes) if verify else None
    locker = Locker(lock, checking=check) if lock else None
    for plan in plans or (() if init else _shipped()):
        if verifier:
            answers += verifier.verify_one(plan, request, findings, printing=format_ == "text")
        elif dry_run:
            answers += dry_run_one(plan, request, findings, printing=format_ == "text")
        elif locker:
            locker.lock_one(plan, request, findings)
        elif check:
            check_one(plan, request, findings)
        elif explain:
            answers += explain_one(plan, explain, request, findings, printing=format_ != "json")
        elif diff:
            answers += diff_one(plan, diff, request, findings, printing=format_ != "json")
        else:
            answers += compile_one(plan, request, findings, printing=format_ != "json")
    if verifier:
        verifier.close()
    if locker:
        locker.write(findings)
    if format_ == "json":
        click.echo(json.dumps({"findings": findings.data(), **({kind: answers} if kind else {})}, indent=2))
    else:
        for line in findings.github() if format_ == "github" else findings.text(paint):
            click.echo(line)
    sys.exit(findings.exit_code(strict=strict))


# What is asked for, and the key of its answers in JSON; a check, also of a lock, has none beside the findings.
_ANSWERS = {"verify": "proofs", "dry_run": "dry_runs", "explain": "explanations", "diff": "differences", "lock": ""}


def _one_question(check: bool, **asked: object) -> str:
    """The key of the answers in JSON. Questions that are not answered together are refused, not dropped."""
    given = [name for name in asked if asked[name]]
    if len(given) > 1 or (check and given in (["explain"], ["diff"])):
        options = [f"--{name.replace('_', '-')}" for name in [*(["check"] if check else []), *given]]
        raise click.UsageError(f"{' and '.join(options)} are answered one at a time: give one of them")
    return _ANSWERS[given[0]] if given else "" if check else "plans"


def _shipped() -> Sequence[str]:
    from shardplan.resources import shipped_plans

    return tuple(shipped_plans())


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
