"""More tp ranks than KV heads: each rank keeps its part of a head's columns, and neighbours gather the head itself.

The weights stay cut evenly over all ranks, so that checkpoints know nothing of it; the backward of the gather adds up
what the neighbours' query heads say about the head that they share.
"""

from __future__ import annotations

from shardplan.edges import Collective, Edge
from shardplan.inventory import HeadInfo, ModuleInfo, ancestors
from shardplan.layouts import Conversion, shard
from shardplan.resolve import ResolvedPlan
from shardplan.styles import Split

GROUPS = "num_key_value_groups"  # the attribute by which transformers' attention repeats KV heads


def shared_heads(resolved: ResolvedPlan, tp: int) -> dict[str, int]:
    """Attention modules, and their projections of keys and values, with how many ranks share each of their KV heads."""
    found: dict[str, int] = {}
    for module in resolved.modules:
        above = resolved.by_fqn.get(next(ancestors(module.fqn), ""))
        heads = above.info.attention if above else None
        cut = module.info.kind.is_linear and module.style is not None and module.style.split is Split.OUTPUT
        if above and heads and cut and projects_kv(module.info, heads) and (shared := replicas(heads, tp)) > 1:
            found[above.fqn] = found[module.fqn] = shared
    return found


def replicas(heads: HeadInfo, tp: int) -> int:
    """How many neighbouring ranks share a KV head; 1 where each has heads of its own, or where tp fits neither way."""
    shared = tp // heads.kv_heads
    divides = tp % heads.kv_heads == 0 and heads.heads % tp == 0 and heads.head_dim % max(shared, 1) == 0
    return shared if divides and heads.kv_heads < heads.heads and shared > 1 else 1


def projects_kv(linear: ModuleInfo, heads: HeadInfo) -> bool:
    """Whether a linear of an attention module gives its keys or its values, as its width tells."""
    return heads.kv_heads < heads.heads and linear.features[0] == heads.kv_heads * heads.head_dim


def gather_heads(within: int) -> Edge:
    """The output edge of such a linear: (..., head_dim / within) -> (..., head_dim)."""
    collective = Collective("all_gather", "reduce_scatter", dim=-1, within=within)
    return Edge(Conversion(shard(-1), shard(-1)), whole=collective, cut=collective)
