"""A plan after loading: frozen, typed, and every rule knowing the layer and the line that it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardplan.diagnostics import Location
from shardplan.layouts import STREAM, Conversion
from shardplan.patterns import Pattern
from shardplan.sections import Section

NULL = "null"

LayerKind = Literal["hf", "shipped", "user"]


@dataclass(frozen=True, slots=True, order=True)
class Layer:
    """Where rules come from. ``rank`` orders layers: the higher one wins."""

    rank: int
    kind: LayerKind
    name: str

    def __str__(self) -> str:
        return f"[{self.kind}]"


@dataclass(frozen=True, slots=True)
class Rule:
    """One plan line.

    Attributes:
        pattern: which modules or parameters it speaks of.
        style: a style name; ``NULL`` for a written ``null``; ``None`` for a mapping that states edges only.
        input, output: the edges that the line states, overriding the style's own.
        where, layer: its provenance.
        dim: that `shard` cuts; None leaves the style's own.
        sections: what the packed parameters of the module consist of.
        local_sizes: attributes that count what is cut.
        native: a ``torch`` ``ParallelStyle`` given from Python instead of a style name, applied as it stands.
    """

    pattern: Pattern
    style: str | None
    where: Location
    layer: Layer
    input: Conversion | None = None
    output: Conversion | None = None
    dim: int | None = None
    sections: tuple[Section, ...] = ()
    local_sizes: tuple[str, ...] = ()
    native: Any = None

    def says(self) -> tuple[object, ...]:
        """What the rule decides, without its pattern and provenance: two rules that say the same do not conflict."""
        return (self.style, self.input, self.output, self.dim, self.sections, self.local_sizes, self.native)

    @property
    def of_hf(self) -> bool:
        """Whether it comes from transformers' own plan, completed."""
        return self.layer.kind == "hf"

    @property
    def spoken(self) -> str:
        """The same for people, as a plan writes it; a torch style by its class."""
        options = {
            "input": self.input,
            "output": self.output,
            "dim": self.dim,
            "sections": _listed(self.sections),
            "local_sizes": _listed(self.local_sizes),
        }
        stated = (f"{name}: {value}" for name, value in options.items() if value not in (None, ""))
        name = type(self.native).__name__ if self.native is not None else self.style
        return ", ".join(filter(None, ("null (replicated on purpose)" if name == NULL else name, *stated)))


def _listed(values: tuple[object, ...]) -> str:
    return f"[{', '.join(map(str, values))}]" if values else ""


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules that FSDP2 wraps one by one. ``reshard`` None leaves the choice to FSDP2's default."""

    pattern: Pattern
    where: Location
    layer: Layer
    reshard: bool | int | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Modules whose forward is run again in the backward instead of keeping its activations."""

    pattern: Pattern
    where: Location
    layer: Layer


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Dtypes by torch name (``bfloat16``); None keeps the parameter's own."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """What ``--check`` uses when it is not told a model or a mesh. ``places``: where the plan names each model."""

    models: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()
    places: tuple[Location, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """A loaded plan file, or several merged. ``None`` means that the file says nothing on a question.

    Attributes:
        name: the file's name without suffix, for reports.
        where: the file as a whole.
        architectures: model class names the plan is for; empty means any.
        roots: candidates that a leading dot stands for; the first that exists in the model counts.
        rules, units, recompute: in the order written, lower layers first.
        root_reshard: whether the outermost FSDP2 unit frees its parameters after the forward.
        extends: the layer below, still unresolved (a shipped name or a path), or None.
        extends_where: where that is written; of a merged plan, where its highest layer that has one names the others.
        rank: that of the plan's own layer, the highest; what layers below it say is inherited.
        omits_silently: written as a Python dict, whose convention is that what it does not name is replicated.
        fallback: ``hf``, the default, lets the model's own tp_plan fill modules on which no rule spoke; ``none`` does
            not.
        over_hf: the model's own tp_plan, completed, is the lowest layer; it is known once there is a model.
        unmatched: its keys that match nothing in the model.
    """

    name: str
    where: Location
    architectures: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    units: tuple[Unit, ...] = ()
    root_reshard: bool | int | None = None
    recompute: tuple[Recompute, ...] | None = None
    sequence_parallel: bool | None = None
    logits: Literal["sharded", "gathered"] | None = None
    mixed_precision: MixedPrecision | None = None
    cpu_offload: bool | None = None
    reference: Reference = field(default_factory=Reference)
    extends: str | None = None
    extends_where: Location | None = None
    fallback: Literal["hf", "none"] | None = None
    over_hf: bool = False
    unmatched: tuple[str, ...] = ()
    omits_silently: bool = False
    rank: int = 0

    @property
    def filled(self) -> bool:
        """Whether the model's own tp_plan fills what no rule speaks of, without being a layer that was asked for."""
        return not self.over_hf and not self.omits_silently and self.fallback != "none"

    @property
    def speaks_of_stream(self) -> bool:
        """Whether a rule says where the residual stream is cut; without one sequence parallelism means nothing."""
        edges = (edge for rule in self.rules for edge in (rule.input, rule.output) if edge)
        return any(STREAM in (edge.source, edge.target) for edge in edges)
