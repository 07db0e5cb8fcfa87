"""More tp ranks than KV heads: each rank keeps its part of a head's columns, and neighbours gather the head itself.

The weights stay cut evenly over all ranks, so that checkpoints know nothing of it; the backward of the gather adds up
what the neighbours' query heads say about the head that they share.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.adapters import has_adapters
from shardplan.attention import HeadInfo
from shardplan.edges import Collective, Edge, Part
from shardplan.inventory import ancestors
from shardplan.layouts import Conversion, shard
from shardplan.resolved import ResolvedModule, ResolvedPlan
from shardplan.sections import UnknownSizeError, section_lengths
from shardplan.styles import Split

GROUPS = "num_key_value_groups"  # the attribute by which transformers' attention repeats KV heads


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """KV heads of which ``ranks`` neighbours share each one; ``parts`` of a packed projection's local output."""

    ranks: int
    parts: tuple[Part, ...] = ()

    def gather(self) -> Edge:
        """The output edge of a projection of keys or values: (..., head_dim / ranks) -> (..., head_dim)."""
        collective = Collective("all_gather", "reduce_scatter", dim=-1, within=self.ranks, parts=self.parts)
        return Edge(Conversion(shard(-1), shard(-1)), whole=collective, cut=collective)


def shared_heads(resolved: ResolvedPlan, tp: int) -> dict[str, SharedHeads]:
    """Attention modules, and their projections of keys and values, whose KV heads neighbouring ranks share.

    None where such a projection has adapters, whose part of the keys would not be gathered.
    """
    found: dict[str, SharedHeads] = {}
    for module in resolved.modules:
        above = resolved.by_fqn.get(next(ancestors(module.fqn), ""))
        heads, style = above.info.attention if above else None, module.style
        if not above or not heads or not style or not module.info.kind.is_linear or style.split is not Split.OUTPUT:
            continue
        ranks, kv_width = replicas(heads, tp), heads.kv_heads * heads.head_dim
        lengths = _lengths(resolved, module) if style.sections else (module.info.features[0],)
        if ranks > 1 and kv_width in lengths:
            parts = tuple(Part(length // tp, length == kv_width) for length in lengths) if style.sections else ()
            found[above.fqn] = found[module.fqn] = SharedHeads(ranks, parts)
    adapted = {next(ancestors(fqn)) for fqn in found if has_adapters(fqn, resolved.inventory)}
    return {fqn: shared for fqn, shared in found.items() if adapted.isdisjoint((fqn, next(ancestors(fqn))))}


def _lengths(resolved: ResolvedPlan, module: ResolvedModule) -> tuple[int, ...]:
    style, whole = module.style, module.info.features[0]
    try:
        return section_lengths(style.sections, resolved.inventory, module.fqn, whole) if style else ()
    except UnknownSizeError:
        return ()  # `check` has refused it


def replicas(heads: HeadInfo, tp: int) -> int:
    """How many neighbouring ranks share a KV head; 1 where each has heads of its own, or where tp fits neither way."""
    shared = tp // heads.kv_heads
    divides = tp % heads.kv_heads == 0 and heads.heads % tp == 0 and heads.head_dim % max(shared, 1) == 0
    return shared if divides and heads.kv_heads < heads.heads and shared > 1 else 1


def counts_kv_heads(attribute: str) -> bool:
    """Whether an attribute of attention counts KV heads, as its name tells."""
    return "key_value_heads" in attribute or "kv_heads" in attribute
