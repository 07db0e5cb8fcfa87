"""How much of a model a plan shards over tp, and what stays whole: on purpose, or because no rule speaks of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod

from shardplan.compiled import CompiledParameter, CompiledPlan
from shardplan.plan import Rule
from shardplan.resolved import ResolvedParameter, ResolvedPlan


class Treatment(Enum):
    """What becomes of a parameter on the tp axis."""

    SHARDED = "sharded"
    ON_PURPOSE = "replicated on purpose"
    BY_OMISSION = "replicated by omission"
    NATIVE = "left to a style that is applied as it stands"


@dataclass(frozen=True, slots=True)
class Share:
    """Some of a model's parameters; percentages are of all of them.

    Attributes:
        style: the rules' word for it: ``sequence_parallel``, ``null``; "" for all styles together.
        parameters: how many tensors.
        elements: how many numbers they hold.
    """

    treatment: str
    style: str
    parameters: int
    elements: int
    nbytes: int
    elements_percent: float
    nbytes_percent: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """Distinct parameters by treatment, every treatment once, then by style within each."""

    treatments: tuple[Share, ...]
    styles: tuple[Share, ...]


def coverage_of(resolved: ResolvedPlan, compiled: CompiledPlan) -> Coverage:
    """Account for every parameter once, tied ones under the first name that a rule decides about."""
    claimed = _claims(resolved)
    whole = compiled.parameters
    groups: dict[tuple[Treatment, str], list[CompiledParameter]] = {}
    for parameter in whole:
        claim = claimed.get(parameter.identity)
        groups.setdefault((_treatment(parameter, claim), _style(claim)), []).append(parameter)
    return Coverage(
        treatments=tuple(
            _share(treatment, "", [p for (of, _), group in groups.items() if of is treatment for p in group], whole)
            for treatment in Treatment
        ),
        styles=tuple(_share(treatment, style, group, whole) for (treatment, style), group in groups.items() if style),
    )


def _claims(resolved: ResolvedPlan) -> dict[int, ResolvedParameter]:
    claims: dict[int, ResolvedParameter] = {}
    for module in resolved.modules:
        for parameter in module.parameters:
            if parameter.claim is not None:
                claims.setdefault(parameter.info.identity, parameter)
    return claims


def _treatment(parameter: CompiledParameter, claim: ResolvedParameter | None) -> Treatment:
    if claim is None:
        return Treatment.BY_OMISSION
    if claim.style is not None and claim.style.native is not None:
        return Treatment.NATIVE
    return Treatment.SHARDED if parameter.sharded else Treatment.ON_PURPOSE


def _style(claim: ResolvedParameter | None) -> str:
    """As the plan writes it; a torch style given from Python by its class."""
    rule: Rule | None = claim.claim if claim else None
    if rule is None:
        return ""
    return type(rule.native).__name__ if rule.native is not None else str(rule.style)


def _share(
    treatment: Treatment, style: str, group: Collection[CompiledParameter], whole: Collection[CompiledParameter]
) -> Share:
    elements, nbytes = _elements(group), _nbytes(group)
    percents = _percent(elements, _elements(whole)), _percent(nbytes, _nbytes(whole))
    return Share(treatment.value, style, len(group), elements, nbytes, *percents)


def _elements(parameters: Iterable[CompiledParameter]) -> int:
    return sum(prod(p.shape) for p in parameters)


def _nbytes(parameters: Iterable[CompiledParameter]) -> int:
    return sum(p.nbytes for p in parameters)


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 4) if whole else 0.0
