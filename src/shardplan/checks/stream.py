"""Checks of the residual stream: cut once before the decoder layers, gathered once before the head."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.names import general
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic, Location
from shardplan.inventory import ancestors
from shardplan.layouts import REPLICATE, STREAM, Conversion
from shardplan.resolve import ResolvedModule

# Attention that is causal without a mask, as long as no padding asks for one.
MASKLESS_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", None)


def check_stream(target: Target) -> Iterator[Diagnostic]:
    """SP204: with sequence parallelism on, the stream begins once and ends once."""
    if target.sequence_parallel and target.mesh.has_tp:
        yield from _begin(target)
        if target.stream.cut_by_embedding:
            yield from _counted_from_a_part(target)
        yield from _end(target)


def _begin(target: Target) -> Iterator[Diagnostic]:
    resolved, cuts = target.resolved, target.stream.cuts
    from_embedding = target.stream.cut_by_embedding
    first = target.spell(f"{target.stream.layers or 'layers'}.0")
    hint = f"cut it at the first decoder layer: `{first}: {{input: replicate -> stream}}`"
    if not cuts and not from_embedding and not _written(target, "input", Conversion(REPLICATE, STREAM)):
        yield _fault(
            "nothing cuts the residual stream, so sequence parallelism has no effect", resolved.plan.where, hint
        )
    elif len(cuts) + from_embedding > 1:
        places = [general(module.fqn) for module in cuts] + ["the embedding's output"] * from_embedding
        many = listed(f"{place} ({places.count(place)} modules)" if places.count(place) > 1 else place
                      for place in dict.fromkeys(places))  # fmt: skip
        yield _fault(f"the residual stream is cut more than once: at {many}", _where(target, cuts[0]), hint)
    elif cuts and not _is_first_member(target, cuts[0]):
        message = f"the residual stream is cut at {cuts[0].fqn}, which is not the first decoder layer"
        yield _fault(message, _where(target, cuts[0]), hint)


def _counted_from_a_part(target: Target) -> Iterator[Diagnostic]:
    """Models count positions, and build masks, from the length of the embedding's output."""
    inventory = target.resolved.inventory
    embedding = target.resolved.by_fqn[inventory.embedding or ""]
    where = _where(target, embedding)
    first = target.spell(f"{target.stream.layers or 'layers'}.0")
    cut_later = f"cut the stream at the first decoder layer instead: `{first}: {{input: replicate -> stream}}`"
    if inventory.attention not in MASKLESS_ATTENTION or inventory.sliding_window:
        built = "a sliding window" if inventory.sliding_window else f"{inventory.attention} attention"
        message = f"the embedding's output is cut, and {built} needs a mask, which the model would build from that part"
        yield Diagnostic("SP204", message, where, embedding.fqn, "an embedding that gives replicate", cut_later)
    for module in target.resolved.modules:
        if "Rotary" in module.info.class_name and not (module.style and module.style.positions):
            message = f"the embedding's output is cut, and {module.fqn} would count positions from that part"
            hint = f"add `{target.spell(module.fqn)}: rotary`, or {cut_later}"
            yield Diagnostic("SP204", message, where, module.fqn, "style rotary, which gives it all positions", hint)


def _end(target: Target) -> Iterator[Diagnostic]:
    gathers = target.stream.gathers
    if not gathers and not _written(target, "output", Conversion(STREAM, REPLICATE)):
        hint = "gather it behind the final norm: `.norm: {style: sequence_parallel, output: stream -> replicate}`"
        yield _fault("nothing gathers the residual stream before the head", target.resolved.plan.where, hint)
    elif len(gathers) > 1 or (gathers and target.stream.carries(gathers[0].fqn)):
        places = listed(dict.fromkeys(general(module.fqn) for module in gathers))
        message = f"the residual stream is gathered at {places}"
        yield _fault(message, _where(target, gathers[0]), "gather it once, behind the final norm")


def _written(target: Target, side: str, conversion: Conversion) -> bool:
    """Whether a rule that is at fault already says so: one that matches nothing, or whose style is unknown."""
    rules = (matched.line for matched in target.resolved.rules if id(matched.line) in target.faulty.rules)
    return any(getattr(rule, side) == conversion for rule in rules)


def _is_first_member(target: Target, module: ResolvedModule) -> bool:
    parent = next(ancestors(module.fqn), "")
    members = (m for m in target.resolved.modules if m.fqn and next(ancestors(m.fqn)) == parent)
    return target.resolved.inventory.by_fqn[parent].container and next(members) is module


def _fault(message: str, where: Location, hint: str) -> Diagnostic:
    return Diagnostic("SP204", message, where, "residual stream", "one cut and one gather", hint)


def _where(target: Target, module: ResolvedModule) -> Location:
    return module.rule.where if module.rule else target.resolved.plan.where
