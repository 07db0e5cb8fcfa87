"""``plan-compile --init``: a plan to start from, out of transformers' own or out of a Python dict."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from shardplan.command.request import inventory_of
from shardplan.diagnostics import PlanError
from shardplan.findings import Findings


def init(model: str | None, source: str | None, findings: Findings) -> None:
    """Print a plan file for ``model``, or one that says what the Python dict at ``source`` (``module:name``) does."""
    if (model is None) == (source is None):
        raise click.UsageError("--init needs a model (--model) or a Python dict (--from module:name), and not both")
    try:
        click.echo(_from_dict(source) if source is not None else _from_model(str(model)), nl=False)
    except PlanError as refused:
        findings.add(refused.diagnostics)


def _from_model(model: str) -> str:
    import transformers

    from shardplan.hf.collect import require_plan
    from shardplan.hf.plan import hf_plan, is_derived
    from shardplan.written import plan_text

    inventory = inventory_of(model)
    require_plan(inventory)
    plan = hf_plan(inventory)
    name, lists = inventory.architectures[0], [unit.pattern.text for unit in plan.units]
    root = lists[0].split(".")[0] if lists and "." in lists[0] and not lists[0].startswith("layers") else ""
    head = (
        f"transformers {transformers.__version__}'s own plan for {name}, completed by what it leaves out.",
        "Check it, and prove it: plan-compile --verify FILE --model CONFIG --mesh dp=2,tp=2",
    )
    return plan_text(plan, head, [name], root, remark=lambda rule: "derived" if is_derived(rule) else "transformers")


def _from_dict(source: str) -> str:
    from shardplan.from_python import plan_from_dict
    from shardplan.written import plan_text

    plan = plan_from_dict(_imported(source))
    try:
        return plan_text(plan, (f"What {source} says.",))
    except ValueError as error:
        raise click.UsageError(f"{source}: {error}; register it with --styles and name it") from None


def _imported(source: str) -> Any:
    module, _, name = source.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"cannot import '{source}': {error}", param_hint="--from") from None
    found = found() if callable(found) else found
    if not isinstance(found, dict):
        raise click.BadParameter(f"'{source}' is a {type(found).__name__}, not a dict", param_hint="--from")
    return found
