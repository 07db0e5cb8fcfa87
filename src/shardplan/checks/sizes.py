"""Checks of the model's sizes against the tp degree: heads, and every dim that is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

from shardplan.checks.names import general, last
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic, Location
from shardplan.inventory import ancestors
from shardplan.lower import split_dim
from shardplan.resolve import ResolvedModule
from shardplan.styles import Kind, Split


def check_heads(target: Target) -> Iterator[Diagnostic]:
    """SP201: tp divides heads and KV heads. Columns may divide where heads do not, and then heads are torn apart."""
    for module in _torn(target):
        heads = module.info.attention
        assert heads is not None
        name = general(module.fqn)
        yield Diagnostic(
            "SP201",
            f"tp={target.mesh.tp} does not divide the heads of {name}: {heads.heads} heads, {heads.kv_heads} KV heads, "
            f"head_dim {heads.head_dim}",
            where=module.rule.where if module.rule else target.resolved.plan.where,
            subject=name,
            expected=f"a tp that divides both: {_degrees(gcd(heads.heads, heads.kv_heads))}",
            hint="choose one of these degrees; KV heads are not replicated",
        )


def check_head_counts(target: Target) -> Iterator[Diagnostic]:
    """SP210: attention whose methods count all heads by an attribute, where a rank has only some of them."""
    for module in _with_cut_heads(target) if target.mesh.has_tp else ():
        heads = module.info.attention
        projections = [
            m for m in target.resolved.modules if next(ancestors(m.fqn), None) == module.fqn and _cuts_output(m)
        ]
        if heads is not None and heads.hard_coded and len(projections) > 1:  # a packed one is reported as such
            name, attributes = general(module.fqn), listed([f"self.{attribute}" for attribute in heads.hard_coded])
            yield Diagnostic(
                "SP210",
                f"{name}, a {module.info.class_name}, shapes its activations by {attributes}, "
                f"the number of all {heads.heads} heads",
                where=module.rule.where if module.rule else target.resolved.plan.where,
                subject=name,
                expected="attention that takes the number of heads from its activations: view(..., -1, head_dim)",
                hint="write it so in the model, or replicate the attention with null, without a block around it",
            )


def _torn(target: Target) -> list[ResolvedModule]:
    """Attention modules with cut linears inside whose heads tp does not divide."""
    tp = target.mesh.tp
    return [
        module
        for module in _with_cut_heads(target)
        if (heads := module.info.attention) is not None and (heads.heads % tp or heads.kv_heads % tp)
    ]


def _cuts_output(module: ResolvedModule) -> bool:
    return module.style is not None and module.style.split is Split.OUTPUT


def _with_cut_heads(target: Target) -> list[ResolvedModule]:
    """Attention modules with cut linears inside."""
    cut = (m.fqn for m in target.resolved.modules if _cuts_output(m))
    around = {above for fqn in cut for above in ancestors(fqn)}
    return [module for module in target.resolved.modules if module.fqn in around and module.info.attention]


@dataclass(slots=True)
class _Cut:
    """Parameters that are cut along one dim of the model: the features between two linears, or the vocabulary."""

    length: int
    place: str
    vocabulary: bool
    where: Location
    names: list[str] = field(default_factory=list)


def check_dims(target: Target) -> Iterator[Diagnostic]:
    """SP202: tp divides every dim that is cut; a vocabulary need only have something for every rank."""
    tp = target.mesh.tp
    for cut in _cuts(target):
        chunk = -(-cut.length // tp)
        if cut.vocabulary and chunk * (tp - 1) >= cut.length:
            problem = f"would be cut into {_shards(cut.length, tp)}: a rank without a row"
            expected, hint = "at least one row for every rank", "choose a smaller tp"
        elif not cut.vocabulary and cut.length % tp:
            problem = f"would be cut into {_shards(cut.length, tp)}"
            expected = f"a tp that divides {cut.length}: {_degrees(cut.length)}"
            hint = f"choose one of these degrees, or change the model's {cut.length}"
        else:
            continue
        names = list(dict.fromkeys(cut.names))
        verb = "share a dim" if len(names) > 1 else "has a dim"
        message = f"{cut.place}{listed(names)} {verb} of {cut.length}, which over tp={tp} {problem}"
        yield Diagnostic("SP202", message, cut.where, ", ".join(names), expected, hint)


def _cuts(target: Target) -> list[_Cut]:
    """Every dim that is cut, once: over all layers, and for all who share it."""
    torn = {module.fqn for module in _torn(target)}
    cuts: dict[tuple[str, int], _Cut] = {}
    for module in target.resolved.modules:
        vocabulary = _is_vocabulary(target, module)
        parent = module.block if module.block is not None else next(ancestors(module.fqn), "")
        place = "" if vocabulary else general(parent)
        for parameter in module.parameters:
            dim = split_dim(parameter.style, module, parameter.info.name)
            if dim is None or parameter.claim is None or not torn.isdisjoint(ancestors(module.fqn)):
                continue
            length, said = parameter.info.shape[dim], f"{place}: " if place else ""
            cut = cuts.setdefault((place, length), _Cut(length, said, vocabulary, parameter.claim.where))
            cut.names.append(general(module.fqn) if vocabulary else last(module.fqn))
    return list(cuts.values())


def _is_vocabulary(target: Target, module: ResolvedModule) -> bool:
    embedding = module.info.kind is Kind.EMBEDDING and module.style is not None and module.style.split is Split.INPUT
    return embedding or module.fqn == target.resolved.inventory.head


def _shards(length: int, tp: int) -> str:
    chunk = -(-length // tp)
    return "+".join(str(max(0, min(chunk, length - rank * chunk))) for rank in range(tp))


def _degrees(length: int) -> str:
    degrees = [str(degree) for degree in range(1, length + 1) if length % degree == 0]
    return listed(degrees if len(degrees) <= 12 else [*degrees[:12], "more"], "or")
