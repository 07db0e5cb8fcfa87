"""Checks of the model's sizes against the tp degree: heads, and every dim that is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from shardplan.attention import HeadInfo
from shardplan.checks.groups import FEATURES
from shardplan.checks.names import general, last, with_article
from shardplan.checks.packed import check_local_sizes, known_lengths
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic, Location, Severity
from shardplan.inventory import ancestors
from shardplan.kv_heads import replicas
from shardplan.lower import split_dim
from shardplan.mesh import TP, MeshSpec
from shardplan.residual import input_conversion, output_conversion
from shardplan.resolved import ResolvedModule, ResolvedParameter
from shardplan.styles import Kind, Split


def check_heads(target: Target) -> Iterator[Diagnostic]:
    """SP201: tp divides heads and KV heads. Columns may divide where heads do not, and then heads are torn apart."""
    legal = _Legal(target)
    for module in _torn(target):
        heads = module.info.attention
        assert heads is not None
        name = general(module.fqn)
        yield Diagnostic(
            "SP201",
            f"tp={target.mesh.tp} does not divide the heads of {name}: {heads.heads} heads, {heads.kv_heads} KV heads, "
            f"head_dim {heads.head_dim}",
            where=target.where(module.rule),
            subject=name,
            expected=legal.expected(module, heads),
            hint="choose one of these degrees",
        )


def check_shared_heads(target: Target) -> Iterator[Diagnostic]:
    """SP215, a note: more ranks than KV heads, so that neighbours gather the heads that they share."""
    for fqn, shared in target.shared_heads.items():
        module = target.resolved.by_fqn[fqn]
        if module.info.attention is not None:
            kv_heads, tp = module.info.attention.kv_heads, target.mesh.tp
            names = [last(other) for other in target.shared_heads if next(ancestors(other), None) == fqn]
            yield Diagnostic(
                "SP215",
                f"KV heads replicated x{shared.ranks} in {general(fqn)}, which has {kv_heads} for tp={tp}; "
                f"{listed(names)} {'stay' if len(names) > 1 else 'stays'} cut over all ranks",
                where=target.where(module.rule),
                subject=general(fqn),
                expected=f"at no cost: a tp up to {kv_heads}",
                hint=f"it costs an all-gather of their outputs among {shared.ranks} neighbours in the forward, a "
                "reduce-scatter in the backward, for keys and for values",
                severity=Severity.NOTE,
            )


def check_head_counts(target: Target) -> Iterator[Diagnostic]:
    """SP210: attention whose methods count all heads by an attribute, where a rank has only some of them."""
    for module in _with_cut_heads(target) if target.mesh.has_tp else ():
        heads, style = module.info.attention, module.style
        local = style.local_sizes if style else ()
        if not set(local) <= _known_sizes(target, module):
            continue  # SP214 says it
        counted = [name for name in heads.hard_coded if name not in local] if heads else []
        if heads is not None and counted and not _packs_plainly(target, module):
            name, attributes = general(module.fqn), listed([f"self.{attribute}" for attribute in counted])
            yield Diagnostic(
                "SP210",
                f"{name}, {with_article(module.info.class_name)}, shapes its activations by {attributes}, "
                f"which counts what all {heads.heads} heads have",
                where=target.where(module.rule),
                subject=name,
                expected="attention that takes the number of heads from its activations, or local sizes",
                hint=f"have each rank read its share: `local_sizes: [{', '.join((*local, *counted))}]` in the rule for "
                f"{target.spell(name)}",
            )


def _known_sizes(target: Target, module: ResolvedModule) -> set[str]:
    return {*dict(module.info.sizes), *(f"config.{name}" for name, _ in target.resolved.inventory.sizes)}


def _packs_plainly(target: Target, module: ResolvedModule) -> bool:
    """Whether the only projection inside is a packed one without sections, which is reported as such."""
    projections = [m for m in target.resolved.modules if next(ancestors(m.fqn), None) == module.fqn and _cuts_output(m)]
    return len(projections) < 2 and not any(m.style and m.style.sections for m in projections)


def _torn(target: Target) -> list[ResolvedModule]:
    """Attention modules with cut linears inside whose heads tp does not divide."""
    return [
        module
        for module in _with_cut_heads(target)
        if (heads := module.info.attention) is not None and not _fits(heads, target, module)
    ]


def _fits(heads: HeadInfo, target: Target, module: ResolvedModule) -> bool:
    tp = target.mesh.tp
    return heads.heads % tp == 0 and (heads.kv_heads % tp == 0 or module.fqn in target.shared_heads)


class _Legal:
    """The degrees that would pass in place of the target's."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._at: dict[int, Target] = {}
        self._fits: dict[int, bool] = {}

    def expected(self, module: ResolvedModule, heads: HeadInfo) -> str:
        """What is expected of tp for a module's heads, with the degrees that fit the whole model."""
        own = [tp for tp in _divisors(heads.heads) if _fits(heads, self._with(tp), module)]
        legal = [tp for tp in own if self._fits_all(tp)]
        may_share = all(tp in own for tp in _divisors(heads.heads) if replicas(heads, tp) > 1)
        kv_heads = ", and the KV heads or is a multiple of them" if may_share else " and the KV heads"
        others = [str(tp) for tp in own if tp not in legal]
        but = f" (other sizes of the model rule out {listed(others)})" if others else ""
        return f"a tp that divides the heads{kv_heads}: {_degrees(legal)}{but}"

    def _with(self, tp: int) -> Target:
        if tp not in self._at:
            self._at[tp] = replace(self._target, mesh=MeshSpec(((TP, tp),)))
        return self._at[tp]

    def _fits_all(self, tp: int) -> bool:
        """Whether every module's heads, groups and cut dims fit."""
        if tp not in self._fits:
            target = self._with(tp)
            found = (*check_local_sizes(target), *check_dims(target))
            self._fits[tp] = not _torn(target) and all(finding.code not in ("SP201", "SP202") for finding in found)
        return self._fits[tp]


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
    gathered: bool
    where: Location
    names: list[str] = field(default_factory=list)


def check_dims(target: Target) -> Iterator[Diagnostic]:
    """SP202: every rank gets something of every dim that is cut, and equal parts where they are gathered again."""
    tp = target.mesh.tp
    for cut in _cuts(target):
        chunk = -(-cut.length // tp)
        problem = f"would be cut into {'+'.join(map(str, _shards(cut.length, tp)))}"
        if chunk * (tp - 1) >= cut.length:
            problem += ": a rank without a row"
            expected, hint = "at least one row for every rank", "choose a smaller tp"
        elif cut.gathered and cut.length % tp:
            problem += ", which an edge cannot gather or scatter"
            expected = f"a tp that divides {cut.length}: {_degrees(_divisors(cut.length))}"
            hint = f"choose one of these degrees, change the model's {cut.length}, or leave the features cut"
        else:
            continue
        names = list(dict.fromkeys(cut.names))
        verb = "share a dim" if len(names) > 1 else "has a dim"
        message = f"{cut.place}{listed(names)} {verb} of {cut.length}, which over tp={tp} {problem}"
        yield Diagnostic("SP202", message, cut.where, ", ".join(names), expected, hint)


ALIGNED = 16  # bytes: torch 2.13's grouped products, by which transformers runs fused experts, take no other rows


def check_expert_rows(target: Target) -> Iterator[Diagnostic]:
    """SP202, a warning: a part of fused experts whose rows are no multiple of `ALIGNED`, as those of the whole are."""
    seen: set[str] = set()
    for module in target.resolved.modules:
        for parameter in module.parameters if module.info.experts else ():
            shape, name = parameter.info.shape, general(parameter.info.fqn)
            dim = split_dim(parameter.style, module, parameter.info.name)
            if dim != len(shape) - 1 or len(shape) != 3 or name in seen:
                continue
            lengths = _lengths(target, module, parameter, shape[dim])
            element, tp = parameter.info.nbytes // parameter.info.numel, target.mesh.tp
            rows = {element * sum(_shards(length, tp)[rank] for length in lengths) for rank in range(tp)}
            odd = sorted(row for row in rows if row % ALIGNED)
            if odd and parameter.claim is not None and not element * shape[dim] % ALIGNED:
                seen.add(name)
                yield Diagnostic(
                    "SP202",
                    f"a rank's part of {name} has rows of {odd[0]} bytes over tp={tp}: grouped products of experts, "
                    "transformers' default, raise on it",
                    where=parameter.claim.where,
                    subject=name,
                    expected=f"rows of a multiple of {ALIGNED} bytes",
                    hint='choose another tp, or run `model.set_experts_implementation("eager")`',
                    severity=Severity.WARNING,
                )


def _cuts(target: Target) -> list[_Cut]:
    """Every dim, and every section of one, that is cut, once: over all layers, and for all who share it."""
    torn = {module.fqn for module in _torn(target)}
    cuts: dict[tuple[str, int, bool], _Cut] = {}
    for module in target.resolved.modules:
        vocabulary = _is_vocabulary(target, module)
        parent = module.block if module.block is not None else next(ancestors(module.fqn), "")
        place = "" if vocabulary else general(parent)
        for parameter in module.parameters:
            dim = split_dim(parameter.style, module, parameter.info.name)
            if dim is None or parameter.claim is None or not torn.isdisjoint(ancestors(module.fqn)):
                continue
            said, gathered = f"{place}: " if place else "", not vocabulary and _is_gathered(module)
            for length in _lengths(target, module, parameter, parameter.info.shape[dim]):
                new = _Cut(length, said, gathered, parameter.claim.where)
                cut = cuts.setdefault((place, length, gathered), new)
                cut.names.append(general(module.fqn) if vocabulary else last(module.fqn))
    return list(cuts.values())


def _lengths(target: Target, module: ResolvedModule, parameter: ResolvedParameter, whole: int) -> tuple[int, ...]:
    lengths = known_lengths(target.resolved.inventory, module, parameter.style, whole)
    return lengths if sum(lengths) == whole else (whole,)


def _is_gathered(module: ResolvedModule) -> bool:
    """Whether an edge turns cut features into whole ones or the other way round."""
    return any(
        conversion is not None
        and FEATURES in (conversion.source, conversion.target)
        and conversion.source.kind != conversion.target.kind
        for conversion in (input_conversion(module), output_conversion(module))
    )


def _is_vocabulary(target: Target, module: ResolvedModule) -> bool:
    embedding = module.info.kind is Kind.EMBEDDING and module.style is not None and module.style.split is Split.INPUT
    return embedding or module.fqn == target.resolved.inventory.head


def _shards(length: int, tp: int) -> list[int]:
    """What each rank has of a dim, as DTensor cuts it."""
    chunk = -(-length // tp)
    return [max(0, min(chunk, length - rank * chunk)) for rank in range(tp)]


def _divisors(length: int) -> Iterator[int]:
    return (degree for degree in range(1, length + 1) if length % degree == 0)


def _degrees(degrees: Iterable[int]) -> str:
    found = [str(degree) for degree in degrees]
    return listed(found if len(found) <= 12 else [*found[:12], "more"], "or")
