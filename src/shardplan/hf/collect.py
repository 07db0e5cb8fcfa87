"""What transformers says of a model: its tensor parallel plan, by general names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.checks.names import nearest
from shardplan.diagnostics import Diagnostic, PlanError
from shardplan.hf.styles import HF_STYLES

if TYPE_CHECKING:
    from torch import nn

    from shardplan.inventory import Inventory


def get_hf_tp_plan(model: nn.Module) -> dict[str, str]:
    """The plan that transformers ships for ``model``: of its class, its config and its children, as it collects them.

    It is what ``extends: hf`` and ``plan="auto"`` complete and apply; `shardplan.hf.styles` says what each name means.

    Args:
        model: a transformers model, on the meta device or not.

    Returns:
        Module or parameter names, with ``*`` for numbers, to style names.

    Raises:
        PlanError: SP106, transformers has no plan for it; SP101, for each style that nobody knows: the name, the style,
            the version of transformers and the nearest style that is known.
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    name = type(model).__name__
    if not plan:
        raise PlanError([Diagnostic("SP106", f"transformers has no tp_plan for {name}", subject=name)])
    unknown = [unknown_style(name, key, style) for key, style in plan.items() if style not in HF_STYLES]
    if unknown:
        raise PlanError(unknown)
    return plan


def require_plan(inventory: Inventory) -> None:
    """Refuse a model for which transformers has no plan.

    Raises:
        PlanError: SP106.
    """
    if not inventory.tp_plan:
        name = inventory.architectures[0]
        raise PlanError([Diagnostic("SP106", f"transformers has no tp_plan for {name}", subject=name)])


def unknown_style(model: str, key: str, style: str) -> Diagnostic:
    """SP101 for a rule of transformers' plan."""
    import transformers

    close = nearest(style, HF_STYLES, limit=1)
    return Diagnostic(
        "SP101",
        f"{model}.tp_plan[{key}] of transformers {transformers.__version__} names style {style}, which is unknown",
        subject=key,
        expected=f"one of {', '.join(HF_STYLES)}",
        hint=f"did you mean '{close[0]}'?" if close else "write a rule for it in a plan of your own",
    )
