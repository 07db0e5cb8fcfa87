"""What transformers' plan leaves whole and could cut: attention, MLPs and mixers of the language model, by their names.

An MLP that stays whole beside experts that are cut would count tp times, and attention that stays whole costs memory.
Whatever is inferred is printed as derived, checked like any rule, and proven like any rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shardplan.checks.names import last
from shardplan.experts import GIVING, TAKING
from shardplan.hf.styles import Meaning
from shardplan.inventory import Inventory, ModuleInfo, ancestors

# Linears that read one input -> the linear that takes what they make of it.
_MLPS = (
    ({"gate_proj", "up_proj"}, "down_proj"),
    ({"w1", "w3"}, "w2"),
    ({"fc1"}, "fc2"),
    ({"c_fc"}, "c_proj"),
    ({"up_proj"}, "down_proj"),
    ({"dense_h_to_4h"}, "dense_4h_to_h"),
)
_ATTENTION = (
    ({"q_proj", "k_proj", "v_proj"}, ("o_proj", "out_proj", "dense")),
    ({"q_b_proj", "kv_b_proj"}, ("o_proj",)),
    ({"q_proj", "kv_b_proj"}, ("o_proj",)),
)
_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj"}  # of latent attention: into and out of its small width
_MIXER = {"in_proj", "conv1d", "norm", "out_proj"}
_MIXER_SIZES = {"num_heads", "n_groups", "intermediate_size", "conv_dim", "ssm_state_size"}


def infer(inventory: Inventory, meant: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Meanings of linears, experts and parameters by head, where transformers' plan speaks of no sibling either."""
    base = next(ancestors(inventory.embedding), "") if inventory.embedding else None
    inside = [m for m in inventory.modules if base is not None and m.fqn.startswith(f"{base}." if base else "")]
    found: dict[str, Meaning] = {}
    for module in inside:
        if module.experts is not None and not module.experts.normed and not _said(module, meant):
            found |= dict(_of_experts(module)) if _child_of_layer(inventory, module.fqn) else {}
    cut = {*meant, *found}
    for module in inside:
        children = {last(m.fqn): m for m in inventory.children.get(module.fqn, ())}
        said = any(m.fqn in meant for m in children.values()) or module.fqn in meant
        if said or not _stands_alone(inventory, module.fqn, cut):
            continue
        for name, meaning in _of_children(module, children):
            found[children[name].fqn] = meaning
            found |= {parameter.fqn: Meaning.CUT_OUTPUT for parameter in module.parameters}  # one entry for each head
    return found


def _said(module: ModuleInfo, meant: Mapping[str, Meaning]) -> bool:
    return module.fqn in meant or any(parameter.fqn in meant for parameter in module.parameters)


def _of_experts(module: ModuleInfo) -> Iterator[tuple[str, Meaning]]:
    for parameter in module.parameters:
        if parameter.name in (*GIVING, TAKING):
            yield parameter.fqn, Meaning.CUT_INPUT if parameter.name == TAKING else Meaning.CUT_OUTPUT


def is_mamba2(inventory: Inventory, module: ModuleInfo) -> bool:
    """A mixer that style `mamba2` knows by the names of its parts and sizes, and that ranks can share: by group."""
    children = {last(m.fqn) for m in inventory.children.get(module.fqn, ())}
    own = {parameter.name for parameter in module.parameters}
    sizes = dict(module.sizes)
    known = children >= _MIXER and own >= {"A_log", "D", "dt_bias"} and set(sizes) >= _MIXER_SIZES
    return known and sizes["n_groups"] > 1


def _stands_alone(inventory: Inventory, fqn: str, cut: Collection[str]) -> bool:
    """Whether a decoder layer runs the module itself, or something beside it is cut.

    A small MLP inside a norm is neither.
    """
    child = _child_of_layer(inventory, fqn)
    return child is not None and (child == fqn or any(name.startswith(f"{child}.") for name in cut))


def _child_of_layer(inventory: Inventory, fqn: str) -> str | None:
    """The module that a layer beside the embedding runs and that ``fqn`` is, or is a part of; none in a tower."""
    around = [fqn, *ancestors(fqn)]
    layers = [n for n in range(1, len(around) - 1) if inventory.by_fqn[around[n + 1]].container]
    beside_embedding = layers and around[layers[-1] + 2] == next(ancestors(inventory.embedding or ""), "")
    return around[layers[-1] - 1] if beside_embedding else None


def _of_children(module: ModuleInfo, children: Mapping[str, ModuleInfo]) -> Iterator[tuple[str, Meaning]]:
    linears = {name: child for name, child in children.items() if child.kind.is_linear}
    yield from _of_packed_mlp(module, linears)
    pairs = [(producers, (consumer,)) for producers, consumer in _MLPS]
    for producers, consumers in (*pairs, *(_ATTENTION if module.attention else ())):
        consumer = next((name for name in consumers if name in linears), None)
        known = consumer is not None and set(linears) - _WHOLE == {*producers, consumer}
        if consumer is None or not known or _spans_heads(module, children):
            continue
        widths = {linears[name].features[0] for name in producers}
        if linears[consumer].features[1] in widths or module.attention:
            yield from ((name, Meaning.CUT_OUTPUT) for name in producers)
            yield consumer, Meaning.CUT_INPUT
            return


def _of_packed_mlp(module: ModuleInfo, linears: Mapping[str, ModuleInfo]) -> Iterator[tuple[str, Meaning]]:
    """Gate and up in one linear, one behind the other."""
    if set(linears) == {"gate_up_proj", "down_proj"} and not module.parameters and not module.interleaves:
        gate_up, down = linears["gate_up_proj"], linears["down_proj"]
        if gate_up.features[0] == 2 * down.features[1]:
            yield "gate_up_proj", Meaning.PACKED_OUTPUT
            yield "down_proj", Meaning.CUT_INPUT


def _spans_heads(module: ModuleInfo, children: Mapping[str, ModuleInfo]) -> bool:
    """Whether something beside the linears has an entry for every feature of all heads, or is of an unknown kind."""
    if module.attention is None:
        return bool(module.parameters)
    if any(parameter.shape != (module.attention.heads,) for parameter in module.parameters):
        return True
    whole = {module.attention.heads * module.attention.head_dim, module.attention.kv_heads * module.attention.head_dim}
    shapes = [p.shape for child in children.values() if not child.kind.is_linear for p in child.parameters]
    return any(set(shape) & whole and shape != (module.attention.head_dim,) for shape in shapes)
