"""Plans written in Python: a dict of patterns to styles, and the options of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shardplan.checks.names import with_article
from shardplan.diagnostics import Diagnostic, Location, PlanError
from shardplan.document import RuleOptions
from shardplan.load import rule_options
from shardplan.patterns import Pattern, parse_pattern
from shardplan.plan import NULL, Layer, MixedPrecision, Plan, Recompute, Rule

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

DICT_PLAN = "<dict plan>"
CALL = "<call>"


def plan_from_dict(rules: Mapping[str, Any]) -> Plan:
    """Read what NeMo-RL calls a custom parallel plan: a pattern for each key, and for its value a style.

    Args:
        rules: pattern -> style name, None, a mapping as a plan file has it (``style``, ``input``, ``sections``, ...),
            or a torch ``ParallelStyle``. Stock torch styles are read as layouts; one that cuts the sequence turns
            sequence parallelism on. Any other ``ParallelStyle`` is applied as it stands.

    Raises:
        PlanError: SP008, SP009, SP010, each naming the key; lines count the keys of the dict.
    """
    layer = Layer(0, "user", DICT_PLAN)
    read, findings = [], []
    for number, (key, value) in enumerate(rules.items(), start=1):
        where = Location(DICT_PLAN, number)
        try:
            read.append(_rule(key, value, where, layer))
        except _ReadError as error:
            findings.append(Diagnostic(error.code, f"'{key}': {error}", where=where, subject=str(key)))
    if not rules:
        findings.append(Diagnostic("SP008", "the dict plan is empty", expected="at least one pattern and its style"))
    if findings:
        raise PlanError(findings)
    plan = Plan(DICT_PLAN, Location(DICT_PLAN), rules=tuple(read), omits_silently=True)
    if all(isinstance(value, str | Mapping | None) for value in rules.values()):
        return plan
    from shardplan.translate import settle_edges

    settled = replace(plan, rules=tuple(settle_edges(plan.rules)))
    # Placements name the cut sequence itself, where a plan file says `stream` and leaves the mode open.
    return replace(settled, sequence_parallel=True) if settled.speaks_of_stream else settled


class _ReadError(ValueError):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _rule(key: object, value: Any, where: Location, layer: Layer) -> Rule:
    pattern = _pattern(key)
    if value is None:
        return Rule(pattern, NULL, where, layer)
    if isinstance(value, str):
        return Rule(pattern, value, where, layer)
    if isinstance(value, Mapping):
        return _rule_from_mapping(pattern, value, where, layer)
    return _rule_from_object(pattern, value, where, layer)


def _pattern(key: object) -> Pattern:
    try:
        return parse_pattern(key) if isinstance(key, str) else _refuse("SP008", f"{key!r} is no pattern")
    except ValueError as error:
        raise _ReadError(getattr(error, "code", "SP009"), str(error)) from None


def _rule_from_mapping(pattern: Pattern, value: Mapping[str, Any], where: Location, layer: Layer) -> Rule:
    known = list(RuleOptions.model_fields)
    unknown = [str(key) for key in value if key not in known]
    if unknown or not value:
        _refuse("SP008", f"a rule has the keys {', '.join(known)}, not {', '.join(unknown) or 'none'}")
    try:
        stated = RuleOptions.model_validate(dict(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        _refuse("SP010" if first["type"] == "conversion" else "SP008", f"{first['loc'][0]}: {first['msg']}")
    return Rule(pattern, stated.style, where, layer, **rule_options(stated))


def _rule_from_object(pattern: Pattern, value: Any, where: Location, layer: Layer) -> Rule:
    from torch.distributed.tensor.parallel import ParallelStyle

    from shardplan.translate import read_parallel_style

    if not isinstance(value, ParallelStyle):
        _refuse(
            "SP008",
            f"{with_article(type(value).__name__)} is neither a style name, null, a mapping nor a ParallelStyle",
        )
    reading = read_parallel_style(value)
    if reading is None:
        return Rule(pattern, type(value).__name__, where, layer, native=value)
    return Rule(pattern, reading.style, where, layer, reading.input, reading.output)


def _refuse(code: str, message: str) -> Any:
    raise _ReadError(code, message)


# ---------------------------------------------------------------- the options of a call


@dataclass(frozen=True, slots=True)
class Options:
    """What `apply_plan` was asked beyond the plan. None leaves a question to the plan, False turns a thing off."""

    sequence_parallel: bool | None = None
    mixed_precision: MixedPrecisionPolicy | MixedPrecision | Mapping[str, str] | bool | None = None
    cpu_offload: bool | None = None
    recompute: Sequence[str] | bool | None = None


def with_options(plan: Plan, options: Options) -> Plan:
    """The plan as the call wants it.

    Raises:
        PlanError: SP008, SP009, an option that cannot be read.
    """
    changes: dict[str, Any] = {}
    if options.sequence_parallel is not None:
        changes["sequence_parallel"] = options.sequence_parallel
    if options.cpu_offload is not None:
        changes["cpu_offload"] = options.cpu_offload
    if options.mixed_precision is not None:
        changes["mixed_precision"] = _mixed_precision(options.mixed_precision)
    if options.recompute is not None:
        changes["recompute"] = _recompute(options.recompute)
    return replace(plan, **changes)


def _mixed_precision(asked: Any) -> MixedPrecision | None:
    if asked is False:
        return None
    if isinstance(asked, MixedPrecision):
        return asked
    if isinstance(asked, Mapping):
        fields = {"param": asked.get("param"), "reduce": asked.get("reduce"), "output": asked.get("output")}
        if set(asked) <= set(fields):
            return MixedPrecision(**fields)
    names = {"param": "param_dtype", "reduce": "reduce_dtype", "output": "output_dtype"}
    if all(hasattr(asked, name) for name in names.values()):  # torch's MixedPrecisionPolicy
        return MixedPrecision(**{ours: _dtype_name(getattr(asked, theirs)) for ours, theirs in names.items()})
    raise _bad_option(
        "mixed_precision", asked, "a MixedPrecisionPolicy, a mapping of param, reduce and output, or False"
    )


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _recompute(asked: Any) -> tuple[Recompute, ...]:
    if asked is False:
        return ()
    if asked is True or isinstance(asked, str) or not all(isinstance(text, str) for text in asked):
        raise _bad_option("recompute", asked, "a list of patterns such as ['.layers.*'], or False")
    try:
        patterns = [parse_pattern(text) for text in asked]
    except ValueError as error:
        raise PlanError([Diagnostic("SP009", f"recompute: {error}", where=Location(CALL))]) from None
    return tuple(Recompute(pattern, Location(CALL), Layer(0, "user", CALL)) for pattern in patterns)


def _bad_option(name: str, asked: Any, expected: str) -> PlanError:
    message = f"{name}={asked!r} cannot be read" if isinstance(asked, bool | str | int) else f"{name} cannot be read"
    return PlanError([Diagnostic("SP008", message, where=Location(CALL), subject=name, expected=expected)])
