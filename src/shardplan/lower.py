"""A resolved plan, a mesh and a mode -> a compiled plan: exact names, placements and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardplan.compiled import (
    CompiledModule,
    CompiledParameter,
    CompiledPlan,
    CompiledSection,
    CompiledUnit,
    Head,
    LocalSize,
)
from shardplan.edges import GATHER_FOR_HEAD, HEAD_AFTER_GATHER, Edge, lower_edge
from shardplan.inventory import Inventory, ancestors
from shardplan.kv_heads import GROUPS, SharedHeads, counts_kv_heads, shared_heads
from shardplan.layouts import REPLICATE, Conversion, shard
from shardplan.mesh import MeshSpec
from shardplan.residual import ResidualStream, input_conversion, output_conversion
from shardplan.resolved import ResolvedModule, ResolvedParameter, ResolvedPlan
from shardplan.sections import section_lengths
from shardplan.styles import Gradient, Kind, Split, Style

# (kind of module, side that is cut) -> the dim of each parameter. What is not named is replicated.
SPLIT_DIMS: dict[tuple[Kind, Split], dict[str, int]] = {
    (Kind.LINEAR, Split.OUTPUT): {"weight": 0, "bias": 0},
    (Kind.LINEAR, Split.INPUT): {"weight": 1},
    (Kind.CONV1D, Split.OUTPUT): {"weight": 1, "bias": 0},
    (Kind.CONV1D, Split.INPUT): {"weight": 0},
    (Kind.EMBEDDING, Split.INPUT): {"weight": 0},
    (Kind.EMBEDDING, Split.OUTPUT): {"weight": 1},
}


def lower(resolved: ResolvedPlan, mesh: MeshSpec, *, sequence_parallel: bool) -> CompiledPlan:
    """Compile a plan that `check` has passed.

    Raises:
        UnsupportedConversionError: an edge has no collective (`check` reports these with their place).
    """
    plan = resolved.plan
    stream = ResidualStream(resolved)
    head = _head(resolved)
    lowering = _Lowering(resolved.inventory, mesh.tp, shared_heads(resolved, mesh.tp))
    modules = tuple(
        lowering.module(module, is_head=head is not None and module.fqn == head.fqn) for module in resolved.modules
    )
    coupled = _head_reads_gather(resolved, stream)
    return CompiledPlan(
        name=plan.name,
        model=resolved.inventory.architectures[0],
        mesh=mesh,
        sequence_parallel=sequence_parallel and mesh.tp > 1,
        modules=_couple_head(modules, stream.gather, head.fqn) if coupled and stream.gather and head else modules,
        decoder=stream.decoder,
        gather=stream.gather,
        cut_by_embedding=stream.cut_by_embedding,
        head=head,
        units=_units(resolved),
        root_reshard=plan.root_reshard,
        recompute=tuple(fqn for matched in resolved.recompute for fqn in matched.fqns),
        mixed_precision=plan.mixed_precision,
        cpu_offload=bool(plan.cpu_offload),
    )


# ---------------------------------------------------------------- edges


def _edge(conversion: Conversion | None, *, read_in_parts: bool) -> Edge | None:
    if conversion is None:
        return None
    edge = lower_edge(conversion, read_in_parts=read_in_parts)
    return edge if edge.whole or edge.cut else None


def _head_reads_gather(resolved: ResolvedPlan, stream: ResidualStream) -> bool:
    """Whether the head's input is known to be the gathered stream.

    It is in transformers' own forward, unless something else with parameters stands beside the head.
    """
    inventory, decoder = resolved.inventory, stream.decoder
    if inventory.own_forward or inventory.head is None or decoder is None:
        return False
    beside = next(ancestors(inventory.head), "")
    others = {_child_of(m.fqn, beside) for m in inventory.modules if m.parameters and m.fqn != inventory.head}
    return others <= {decoder, *ancestors(decoder)}


def _child_of(fqn: str, parent: str) -> str:
    """The direct child of ``parent`` that ``fqn`` is or lies in."""
    prefix = f"{parent}." if parent else ""
    return prefix + fqn.removeprefix(prefix).partition(".")[0]


def _couple_head(modules: tuple[CompiledModule, ...], gather: str, head: str) -> tuple[CompiledModule, ...]:
    """Let one reduce-scatter behind the final norm serve as the sum of the head's input gradient.

    Holds for a head that reads the gathered stream, that is transformers' output embedding.
    """
    by_fqn = {module.fqn: module for module in modules}
    output, reads = by_fqn[gather].output, by_fqn[head].input
    if output is None or reads is None or reads.cut is None or reads.cut.backward != "all_reduce":
        return modules
    coupled = {
        gather: replace(by_fqn[gather], output=replace(output, cut=GATHER_FOR_HEAD)),
        head: replace(by_fqn[head], input=replace(reads, cut=HEAD_AFTER_GATHER)),
    }
    return tuple(coupled.get(module.fqn, module) for module in modules)


# ---------------------------------------------------------------- modules, parameters, units


@dataclass(frozen=True, slots=True)
class _Lowering:
    """Lowers module by module, with the sizes of the modules around at hand."""

    inventory: Inventory
    tp: int
    shared_heads: Mapping[str, SharedHeads]

    def module(self, module: ResolvedModule, *, is_head: bool) -> CompiledModule:
        style = module.style
        return CompiledModule(
            fqn=module.fqn,
            path=module.info.path,
            class_name=module.info.class_name,
            style=style.name if style else "",
            where=module.rule.where if module.rule else None,
            layer=module.rule.layer if module.rule else None,
            parameters=tuple(self._parameter(parameter, module) for parameter in module.parameters),
            block=module.block,
            input=_edge(input_conversion(module), read_in_parts=style is not None and style.reads_in_parts),
            # The head's output is not an edge: its logits leave as one DTensor.
            output=None if is_head else self._output(module),
            splits_vocabulary=style is not None and style.split is Split.INPUT and module.info.kind is Kind.EMBEDDING,
            positions=style is not None and style.positions,
            local_sizes=tuple(self._local_sizes(module)),
            counted_once=style is not None and style.counted_once,
            reads_children=module.info.reads_children,
            native=style.native if style else None,
        )

    def _parameter(self, parameter: ResolvedParameter, module: ResolvedModule) -> CompiledParameter:
        info, style = parameter.info, parameter.style
        dim = split_dim(style, module, info.name)
        added_once = is_added_once(parameter, module)
        return CompiledParameter(
            fqn=info.fqn,
            name=info.name,
            shape=info.shape,
            nbytes=info.nbytes,
            identity=info.identity,
            placement=REPLICATE if dim is None else shard(dim),
            gradient=Gradient.COMPLETE if added_once else _gradient(style, module, replicated=dim is None),
            added_once=added_once,
            sections=tuple(self._sections(style, module.fqn, info.shape[dim])) if style and dim is not None else (),
        )

    def _sections(self, style: Style, fqn: str, whole: int) -> Iterator[CompiledSection]:
        start, lengths = 0, section_lengths(style.sections, self.inventory, fqn, whole)
        for section, length in zip(style.sections, lengths, strict=True):
            yield CompiledSection(section.name, start, length)
            start += length

    def _output(self, module: ResolvedModule) -> Edge | None:
        if module.fqn in self.shared_heads and module.info.kind.is_linear:
            return self.shared_heads[module.fqn].gather()
        return _edge(output_conversion(module), read_in_parts=False)

    def _local_sizes(self, module: ResolvedModule) -> Iterator[LocalSize]:
        """What the style says, what kinds of modules keep about themselves, and the repetitions of KV heads."""
        kind, style, sizes = module.info.kind, module.style, dict(module.info.sizes)
        shared = self.shared_heads[module.fqn].ranks if module.fqn in self.shared_heads else 1
        for name in style.local_sizes if style else ():
            field = name.removeprefix("config.")
            total = sizes[field] if field == name else dict(self.inventory.sizes)[field]
            yield LocalSize(field, field != name, total, self.tp // shared if counts_kv_heads(field) else self.tp)
        if kind is Kind.CONV1D and style is not None and style.split is Split.OUTPUT:
            yield LocalSize("nf", False, sizes["nf"], self.tp)
        if shared > 1 and GROUPS in sizes:
            yield LocalSize(GROUPS, False, sizes[GROUPS], shared)


def is_added_once(parameter: ResolvedParameter, module: ResolvedModule) -> bool:
    """Whether a whole parameter is added to a part of a sum: what a style says, and the bias of a row-wise linear."""
    style, name = parameter.style, parameter.info.name
    if split_dim(style, module, name) is not None:
        return False
    row_wise = any(of is not None and of.adds_bias_once for of in (style, module.style))
    return (name == "bias" and row_wise) or (style is not None and style.added_once)


def split_dim(style: Style | None, module: ResolvedModule, name: str) -> int | None:
    """The dim of parameter ``name`` that ``style`` cuts; None where it stays whole."""
    if style is None:
        return None
    if style.split is Split.DIM:
        shape = next(parameter.info.shape for parameter in module.parameters if parameter.info.name == name)
        return style.dim if style.dim < len(shape) else None
    return SPLIT_DIMS.get((module.info.kind, style.split), {}).get(name)


def _gradient(style: Style | None, module: ResolvedModule, *, replicated: bool) -> Gradient:
    """Inside a block whatever is not split works on one rank's part, whichever way it came to be replicated."""
    if not replicated or style is None or style.split in (Split.OUTPUT, Split.INPUT):
        return Gradient.COMPLETE
    return Gradient.PARTIAL if module.inside is not None else style.gradient


def _head(resolved: ResolvedPlan) -> Head | None:
    module = resolved.head
    if module is None or module.style is None or module.style.split is not Split.OUTPUT:
        return None
    output = output_conversion(module)
    gathered = resolved.plan.logits == "gathered" or (output is not None and output.target == REPLICATE)
    weight = next(parameter.info for parameter in module.parameters if parameter.info.name == "weight")
    return Head(module.fqn, vocabulary=weight.shape[0], gathered=gathered)


def _units(resolved: ResolvedPlan) -> tuple[CompiledUnit, ...]:
    """Inner units first, as `fully_shard` wants them; a module named twice takes the later line."""
    reshard = {fqn: matched.line.reshard for matched in resolved.units for fqn in matched.fqns}
    by_fqn = resolved.inventory.by_fqn
    inner_first = sorted(reshard, key=lambda fqn: -fqn.count("."))
    return tuple(CompiledUnit(fqn, by_fqn[fqn].outermost, reshard[fqn]) for fqn in inner_first)
