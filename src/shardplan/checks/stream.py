"""Checks of the residual stream: cut once before the decoder layers, gathered once before the head."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.names import general
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic
from shardplan.inventory import ancestors
from shardplan.layouts import PARTIAL, REPLICATE, STREAM, Conversion
from shardplan.residual import input_conversion, output_conversion
from shardplan.resolved import ResolvedModule
from shardplan.styles import Kind

Fault = tuple[str, str, tuple[ResolvedModule, ...]]  # what is wrong, what to do, and the modules that do it

# Attention that is causal without a mask, as long as no padding asks for one.
MASKLESS_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", None)


def check_stream(target: Target) -> Iterator[Diagnostic]:
    """SP204: with sequence parallelism on, the stream begins once and ends once."""
    for message, hint, modules in _faults(target):
        rules = [module.rule for module in modules]
        message = f"{message}{target.see(*rules)}"
        yield Diagnostic("SP204", message, target.where(*rules), "residual stream", "one cut and one gather", hint)
    if _has_stream(target) and target.stream.cut_by_embedding:
        yield from _counted_from_a_part(target)


def check_layers(target: Target) -> Iterator[Diagnostic]:
    """SP204: what a decoder layer gives holds the residual stream, which is on every rank, and no part of a sum."""
    seen: set[str] = set()
    layers, by_fqn = target.stream.layers, target.resolved.inventory.by_fqn
    is_list = layers is not None and by_fqn[layers].container  # a cut that stands elsewhere has other things around it
    for module in target.resolved.modules if target.mesh.has_tp and is_list else ():
        given, name = output_conversion(module), general(module.fqn)
        is_layer = module.fqn and next(ancestors(module.fqn)) == layers
        if is_layer and given is not None and given.source == PARTIAL and _norms(target, module) and name not in seen:
            seen.add(name)
            yield Diagnostic(
                "SP204",
                f"{name} is a decoder layer, and its rule adds up over tp what it gives, the residual stream with it",
                where=target.where(module.rule),
                subject=name,
                expected="edges at the attention and the MLP of a layer, whose outputs are parts of a sum",
                hint="take the layer out of the rule, and make its attention and its MLP blocks",
            )


def _norms(target: Target, layer: ResolvedModule) -> bool:
    """Whether it norms what it takes, as layers around a residual stream do; one without may be an MLP as a whole."""
    below = (module for module in target.resolved.modules if module.fqn.startswith(f"{layer.fqn}."))
    others = (module for module in below if module.info.kind is Kind.OTHER and module.parameters)
    return any(all(len(parameter.info.shape) == 1 for parameter in module.parameters) for module in others)


def begins_or_ends_wrongly(target: Target) -> frozenset[str]:
    """The modules whose edges `check_stream` speaks of: whatever else is odd about them follows from that."""
    return frozenset(module.fqn for _, _, modules in _faults(target) for module in modules)


def _has_stream(target: Target) -> bool:
    return target.sequence_parallel and target.mesh.has_tp


def _faults(target: Target) -> list[Fault]:
    if not _has_stream(target):
        return []
    stream = target.stream
    # A cut beside the layers stands where the gather was meant to be.
    strays = any(not stream.carries(module.fqn) for module in stream.cuts)
    return [*_begin(target), *(() if strays else _end(target))]


def _begin(target: Target) -> Iterator[Fault]:
    cuts, from_embedding = target.stream.cuts, target.stream.cut_by_embedding
    hint = f"cut it at the first decoder layer: `{_first_layer(target)}: {{input: replicate -> stream}}`"
    if not cuts and not from_embedding and not _written(target, "input", Conversion(REPLICATE, STREAM)):
        at = [m for m in target.resolved.modules if m.rule and target.stream.layers and _is_first_member(target, m)]
        first = [module for module in at if next(ancestors(module.fqn)) == target.stream.layers]
        yield "nothing cuts the residual stream, so sequence parallelism has no effect", hint, tuple(first)
    elif len(cuts) + from_embedding > 1:
        embedding = [target.resolved.embedding] if from_embedding and target.resolved.embedding else []
        places = [general(module.fqn) for module in cuts] + ["the embedding's output"] * from_embedding
        many = listed(f"{place} ({places.count(place)} modules)" if places.count(place) > 1 else place
                      for place in dict.fromkeys(places))  # fmt: skip
        yield f"the residual stream is cut more than once: at {many}", hint, (*cuts, *embedding)
    elif cuts and not _is_first_member(target, cuts[0]):
        yield f"the residual stream is cut at {cuts[0].fqn}, which is not the first decoder layer", hint, cuts[:1]


def _first_layer(target: Target) -> str:
    return target.spell(f"{target.stream.layers or 'layers'}.0")


def _counted_from_a_part(target: Target) -> Iterator[Diagnostic]:
    """Models count positions, and build masks, from the length of the embedding's output."""
    inventory = target.resolved.inventory
    embedding = target.resolved.by_fqn[inventory.embedding or ""]
    where = target.where(embedding.rule)
    cut_later = (
        f"cut the stream at the first decoder layer instead: `{_first_layer(target)}: {{input: replicate -> stream}}`"
    )
    if inventory.attention not in MASKLESS_ATTENTION or inventory.sliding_window:
        built = "a sliding window" if inventory.sliding_window else f"{inventory.attention} attention"
        message = f"the embedding's output is cut, and {built} needs a mask, which the model would build from that part"
        yield Diagnostic("SP204", message, where, embedding.fqn, "an embedding that gives replicate", cut_later)
    for module in target.resolved.modules:
        if "Rotary" in module.info.class_name and not (module.style and module.style.positions):
            message = f"the embedding's output is cut, and {module.fqn} would count positions from that part"
            hint = f"add `{target.spell(module.fqn)}: rotary`, or {cut_later}"
            yield Diagnostic("SP204", message, where, module.fqn, "style rotary, which gives it all positions", hint)


def _end(target: Target) -> Iterator[Fault]:
    gathers = target.stream.gathers
    if not gathers and not _written(target, "output", Conversion(STREAM, REPLICATE)):
        meant = _behind_layers(target)
        norm = next((target.spell(module.fqn) for module in meant if module.info.kind is Kind.OTHER), ".norm")
        hint = f"gather it behind the final norm: `{norm}: {{style: sequence_parallel, output: stream -> replicate}}`"
        yield "nothing gathers the residual stream before the head", hint, meant
    elif len(gathers) > 1 or (gathers and target.stream.carries(gathers[0].fqn)):
        places = listed(dict.fromkeys(general(module.fqn) for module in gathers))
        yield f"the residual stream is gathered at {places}", "gather it once, behind the final norm", gathers


def _behind_layers(target: Target) -> tuple[ResolvedModule, ...]:
    """The modules behind the layers whose edges speak of the stream: one of them was to gather it."""
    modules = target.resolved.modules
    layers = [index for index, module in enumerate(modules) if target.stream.carries(module.fqn)]
    behind = modules[layers[-1] + 1 :] if layers else ()
    return tuple(m for m in behind if m.block is None and m.parameters and _speaks_of_stream(m))


def _speaks_of_stream(module: ResolvedModule) -> bool:
    edges = (input_conversion(module), output_conversion(module))
    return any(STREAM in (edge.source, edge.target) for edge in edges if edge)


def _written(target: Target, side: str, conversion: Conversion) -> bool:
    """Whether a rule that is at fault already says so: one that matches nothing, or whose style is unknown."""
    rules = (matched.line for matched in target.resolved.rules if id(matched.line) in target.faulty.rules)
    return any(getattr(rule, side) == conversion for rule in rules)


def _is_first_member(target: Target, module: ResolvedModule) -> bool:
    parent = next(ancestors(module.fqn), "")
    members = (m for m in target.resolved.modules if m.fqn and next(ancestors(m.fqn)) == parent)
    return target.resolved.inventory.by_fqn[parent].container and next(members) is module
