"""A compiled plan: exact names, placements, collectives and FSDP2 units. Plain data, printable and comparable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

from shardplan.diagnostics import Location
from shardplan.edges import Edge
from shardplan.inventory import ancestors
from shardplan.layouts import Layout, shard
from shardplan.mesh import MeshSpec
from shardplan.plan import Layer, MixedPrecision
from shardplan.styles import Gradient

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class CompiledSection:
    """A section of a packed parameter, which becomes a parameter of its own; ``start`` and ``length`` along its dim."""

    name: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class LocalSize:
    """An attribute of a module that counts what is cut into ``parts``: a rank reads its share of ``total``.

    ``of_config``: it is an attribute of the module's config.
    """

    name: str
    of_config: bool
    total: int
    parts: int


@dataclass(frozen=True, slots=True)
class CompiledParameter:
    """Where one parameter lies on the tp axis and what its gradient is.

    Attributes:
        placement: ``replicate`` or ``shard(dim)``.
        gradient: of a replicated parameter; a sharded one is always COMPLETE for its shard.
        added_once: a row-wise linear's bias: every rank adds its share of it to a sum over tp.
        sections: of a packed parameter, along the dim of ``placement``: each is cut on its own, under a name of its
            own, so that nothing that is saved depends on how many ranks there are.
    """

    fqn: str
    name: str
    shape: tuple[int, ...]
    nbytes: int
    identity: int
    placement: Layout
    gradient: Gradient
    added_once: bool = False
    sections: tuple[CompiledSection, ...] = ()

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of the parameters that it becomes in its module: its own, or one for each section."""
        return tuple(f"{self.name}_{section.name}" for section in self.sections) or (self.name,)

    @property
    def sharded(self) -> bool:
        return self.placement.kind == "shard"


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """Everything that applying the plan does to one module.

    Attributes:
        path: where the module is found in the model; ``fqn`` and what wrappers add.
        style: the style's name, for reports; "" where only a claim from above reaches the module.
        where, layer: the rule that decided.
        block: the block around it, whose edges serve it.
        positions: it is handed the positions of the full sequence.
        native: a torch ``ParallelStyle`` that is applied as it stands instead of all this.
        local_sizes: attributes that count what is cut.
        counted_once: its output is one rank's share of it.
        reads_children: it reads weights of the modules below it by itself.
        splits_vocabulary: an Embedding whose rows are cut: ids of other ranks' rows contribute zero.
    """

    fqn: str
    path: str
    class_name: str
    style: str
    where: Location | None
    layer: Layer | None
    parameters: tuple[CompiledParameter, ...]
    block: str | None
    input: Edge | None = None
    output: Edge | None = None
    splits_vocabulary: bool = False
    positions: bool = False
    local_sizes: tuple[LocalSize, ...] = ()
    counted_once: bool = False
    reads_children: bool = False
    native: Any = None

    @property
    def cuts_weight(self) -> bool:
        return any(parameter.name == "weight" and parameter.sharded for parameter in self.parameters)

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(edge for edge in (self.input, self.output) if edge)


@dataclass(frozen=True, slots=True)
class CompiledUnit:
    """A module that FSDP2 wraps, with the wrappers around it; ``reshard`` None leaves FSDP2's default."""

    fqn: str
    path: str
    reshard: bool | int | None


@dataclass(frozen=True, slots=True)
class Head:
    """The module whose output is the logits, cut over the vocabulary; ``gathered`` gives callers the whole."""

    fqn: str
    vocabulary: int
    gathered: bool


@dataclass(frozen=True)
class CompiledPlan:
    """What `apply` executes.

    Attributes:
        name: the plan's.
        model: the model's class name.
        decoder: the module whose forward carries the residual stream; where sequence parallelism decides, per
            forward, whether the stream is cut. None where the plan cuts no stream.
        gather: the module at whose output the stream ends.
        cut_by_embedding: the embedding's output is cut already, so that models would count positions and build masks
            from a part of the sequence.
        units: FSDP2 units, inner ones first; the model itself is the last one and not listed.
    """

    name: str
    model: str
    mesh: MeshSpec
    sequence_parallel: bool
    modules: tuple[CompiledModule, ...]
    decoder: str | None
    gather: str | None
    cut_by_embedding: bool
    head: Head | None
    units: tuple[CompiledUnit, ...]
    root_reshard: bool | int | None
    recompute: tuple[str, ...]
    mixed_precision: MixedPrecision | None
    cpu_offload: bool

    @cached_property
    def parameters(self) -> tuple[CompiledParameter, ...]:
        """Every parameter once, tied ones under their first name."""
        first: dict[int, CompiledParameter] = {}
        for module in self.modules:
            for parameter in module.parameters:
                first.setdefault(parameter.identity, parameter)
        return tuple(first.values())

    @cached_property
    def by_fqn(self) -> dict[str, CompiledModule]:
        return {module.fqn: module for module in self.modules}

    def find(self, model: nn.Module, fqn: str) -> nn.Module:
        """The module of that name in the model that the plan was compiled for, inside any wrapper."""
        return model.get_submodule(self.by_fqn[fqn].path)

    def column_wise_behind(self, module: CompiledModule) -> tuple[CompiledModule, ...]:
        """The linears cut by their output that read what ``module``'s input edge converts; itself, or in its block."""
        readers = (module, *self._by_block.get(module.fqn, ())) if module.input else ()
        rows = shard(0)
        return tuple(m for m in readers if any(p.name == "weight" and p.placement == rows for p in m.parameters))

    @cached_property
    def _by_block(self) -> dict[str | None, list[CompiledModule]]:
        found: dict[str | None, list[CompiledModule]] = {}
        for module in self.modules:
            found.setdefault(module.block, []).append(module)
        return found

    @property
    def summed_gradients(self) -> frozenset[Gradient]:
        """Which gradients of replicated parameters are summed over tp after a backward."""
        if not self.mesh.has_tp:
            return frozenset()
        return frozenset({Gradient.PARTIAL, Gradient.STREAM} if self.sequence_parallel else {Gradient.PARTIAL})

    @property
    def neighbours(self) -> frozenset[int]:
        """In groups of how many neighbouring tp ranks something is sent."""
        collectives = (c for module in self.modules for edge in module.edges for c in (edge.whole, edge.cut) if c)
        return frozenset(c.within for c in collectives if c.within)

    def summed_parameters(self) -> Iterator[tuple[CompiledModule, CompiledParameter]]:
        """The replicated parameters whose gradients are summed over tp, with their modules."""
        for module in self.modules:
            for parameter in module.parameters:
                if parameter.gradient in self.summed_gradients:
                    yield module, parameter

    def unit_around(self, fqn: str) -> str:
        """The FSDP2 unit that holds a parameter: the innermost one above it, or "", the model."""
        units = {unit.fqn for unit in self.units}
        return next((name for name in ancestors(fqn) if name in units), "")

    def coalesced_sums(self) -> frozenset[str]:
        """The FSDP2 units that end their backward with a sum over tp; the model alone without a dp axis."""
        if not self.mesh.has_dp:
            return frozenset({""} if any(True for _ in self.summed_parameters()) else ())
        return frozenset(self.unit_around(parameter.fqn) for _, parameter in self.summed_parameters())

    def collectives(self) -> Iterator[tuple[CompiledModule, str, str]]:
        """Every tp collective of one step: module, direction (forward or backward), name."""
        for module in self.modules if self.mesh.has_tp else ():
            for edge in module.edges:
                collective = edge.in_mode(self.sequence_parallel)
                for direction, name in (collective.sends if collective else {}).items():
                    yield from repeat((module, direction, name), collective.calls if collective else 0)
