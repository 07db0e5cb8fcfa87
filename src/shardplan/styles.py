"""The styles, one row each: what a style does to a module's parameters and which edges it has when it stands alone.

A row is all there is to a style: `lower` reads it, and nothing else in the compiler knows a style by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from shardplan.layouts import PARTIAL, REPLICATE, STREAM, Conversion, shard
from shardplan.sections import Section


class Split(Enum):
    """Which side of a weight is cut over tp: its output features, its input features, a dim by number, or neither."""

    OUTPUT = "output"
    INPUT = "input"
    DIM = "dim"
    NONE = "none"


class Gradient(Enum):
    """What a replicated parameter's gradient is on one rank, before any sum over tp."""

    COMPLETE = "complete"
    STREAM = "partial while the stream is cut"
    PARTIAL = "partial"


class Kind(Enum):
    """What a module is, as far as splitting its parameters goes."""

    LINEAR = "Linear"
    CONV1D = "Conv1D"  # transformers' linear of GPT-2, whose weight is (in, out)
    EMBEDDING = "Embedding"
    OTHER = "other"

    @property
    def is_linear(self) -> bool:
        return self in (Kind.LINEAR, Kind.CONV1D)


@dataclass(frozen=True, slots=True)
class Style:
    """One row of the table.

    Attributes:
        name: as written in a plan.
        summary: one line for docs and the schema.
        split: which side of the weights is cut.
        kinds: the modules it fits; empty means any.
        input, output: the edges it has outside a block; None where it touches nothing.
        gradient: what its replicated parameters receive.
        claims: whether it decides about parameters; a block decides about its edges only.
        subtree: whether the claim reaches down to the parameters of submodules, where a rule that is no more specific
            speaks about them.
        opens_block: whether what is below computes on local tensors between this module's two edges.
        dim: of each parameter, that `Split.DIM` cuts.
        sections: what a packed parameter consists of along the dim that is cut; each is cut on its own.
        local_sizes: attributes of the module, ``config.`` before those of its config, that count what is cut: each rank
            reads its share.
        parts: styles of what lies below, by name; a rule that is more specific may say otherwise.
        counted_once: its output is the same on every rank and goes into a sum over tp: each rank gives its share.
        added_once: a whole parameter that goes into a sum over tp as it is: each rank adds its share of it.
        bias_once: a whole linear whose input is a part of a sum: each rank adds its share of the bias.
        positions: whether the module is handed the positions of the full sequence, also where the embedding's output,
            from which models count them, is cut.
        native: a torch ``ParallelStyle`` that is applied as it stands; the row then says nothing about layouts.
    """

    name: str
    summary: str
    split: Split = Split.NONE
    kinds: tuple[Kind, ...] = ()
    input: Conversion | None = None
    output: Conversion | None = None
    gradient: Gradient = Gradient.COMPLETE
    claims: bool = True
    subtree: bool = False
    opens_block: bool = False
    dim: int = 0
    sections: tuple[Section, ...] = ()
    local_sizes: tuple[str, ...] = ()
    parts: tuple[tuple[str, Style], ...] = ()
    added_once: bool = False
    bias_once: bool = False
    counted_once: bool = False
    positions: bool = False
    native: Any = None

    @property
    def adds_bias_once(self) -> bool:
        """Whether a bias that stays whole goes into a sum over tp, into which each rank puts its share of it."""
        return self.bias_once or self.split is Split.INPUT

    @property
    def reads_in_parts(self) -> bool:
        """Whether each rank uses the whole input for its own part of the work: input gradients then add up over tp."""
        return self.opens_block or self.split is Split.OUTPUT


_SPLIT_OUTPUT = Conversion(shard(-1), shard(-1))
_LINEARS = (Kind.LINEAR, Kind.CONV1D)

_COLWISE = Style(
    "colwise",
    "cut a Linear's output features, or an Embedding's columns; each rank computes its own",
    split=Split.OUTPUT,
    kinds=(*_LINEARS, Kind.EMBEDDING),
    input=Conversion(REPLICATE, REPLICATE),
    output=_SPLIT_OUTPUT,
)
_ROWWISE = Style(
    "rowwise",
    "cut a Linear's input features, or an Embedding's rows; the partial outputs add up over tp",
    split=Split.INPUT,
    kinds=(*_LINEARS, Kind.EMBEDDING),
    input=_SPLIT_OUTPUT,
    output=Conversion(PARTIAL, REPLICATE),
)
_SHARD = Style(
    "shard",
    "cut one dim of each parameter, the first unless `dim` says another; for parameters beside the linears of a block",
    split=Split.DIM,
)
_BLOCK = Style(
    "block",
    "attention or MLP: one conversion in, one out, local tensors between",
    input=Conversion(STREAM, REPLICATE),
    output=Conversion(PARTIAL, STREAM),
    claims=False,
    opens_block=True,
)

# Dao and Gu 2024, section 8.2: heads and groups of a Mamba-2 mixer are independent up to its output projection. Its
# kernels read the weights of conv1d, norm and out_proj themselves, so nothing but its own edges converts activations.
_SSM = "n_groups * ssm_state_size"
_CONVOLVED = (Section("x", "intermediate_size"), Section("B", _SSM), Section("C", _SSM))
_MAMBA2 = replace(
    _BLOCK,
    name="mamba2",
    summary="a Mamba-2 mixer whole: a block whose projections, convolution and norm are cut by head and by group",
    local_sizes=("num_heads", "n_groups", "intermediate_size", "conv_dim"),
    parts=(
        (
            "in_proj",
            replace(_COLWISE, sections=(Section("z", "intermediate_size"), *_CONVOLVED, Section("dt", "num_heads"))),
        ),
        ("conv1d", replace(_SHARD, sections=_CONVOLVED, local_sizes=("groups", "in_channels", "out_channels"))),
        *((name, _SHARD) for name in ("A_log", "D", "dt_bias", "norm")),
        ("out_proj", _ROWWISE),
    ),
)

STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        _COLWISE,
        Style(
            "colwise_gather_output",
            "colwise, then gather the output features on every rank",
            split=Split.OUTPUT,
            kinds=_LINEARS,
            input=Conversion(REPLICATE, REPLICATE),
            output=Conversion(shard(-1), REPLICATE),
        ),
        _ROWWISE,
        Style(
            "rowwise_split_input",
            "rowwise, taking each rank's part out of a replicated input",
            split=Split.INPUT,
            kinds=_LINEARS,
            input=Conversion(REPLICATE, shard(-1)),
            output=Conversion(PARTIAL, REPLICATE),
        ),
        Style(
            "embedding_rowwise",
            "cut an Embedding's rows, the vocabulary; the partial outputs add up over tp",
            split=Split.INPUT,
            kinds=(Kind.EMBEDDING,),
            output=Conversion(PARTIAL, REPLICATE),
        ),
        Style(
            "embedding_colwise",
            "cut an Embedding's columns, the hidden dim, and gather them on every rank",
            split=Split.OUTPUT,
            kinds=(Kind.EMBEDDING,),
            output=Conversion(shard(-1), REPLICATE),
        ),
        Style(
            "sequence_parallel",
            "a module on the residual stream, replicated; its gradient is summed over tp while the stream is cut",
            input=Conversion(STREAM, STREAM),
            output=Conversion(STREAM, STREAM),
            gradient=Gradient.STREAM,
            subtree=True,
        ),
        Style(
            "replicated_with_grad_allreduce",
            "replicated, but each rank sees only its part of the work (per-head norms): the gradient is summed over tp",
            gradient=Gradient.PARTIAL,
            subtree=True,
        ),
        Style("replicate", "replicated on purpose, like a written null", subtree=True),
        Style("rotary", "position tables: replicated, computed for the full sequence", subtree=True, positions=True),
        Style(
            "replicated_behind_parts",
            "a whole linear whose input is a part of a sum over tp: its gradient is summed and its bias added once",
            gradient=Gradient.PARTIAL,
            bias_once=True,
        ),
        Style(
            "counted_once",
            "a module inside a block that every rank runs whole, an identity expert: each gives a share of its output",
            gradient=Gradient.PARTIAL,
            counted_once=True,
            subtree=True,
        ),
        Style(
            "added_once",
            "a whole parameter that is added to a part of a sum, such as a bias of experts: each rank adds its share",
            added_once=True,
        ),
        _SHARD,
        _BLOCK,
        _MAMBA2,
    )
}

# Older names of transformers for the same styles, with the versions that used them.
ALIASES = {
    "colwise_rep": "colwise_gather_output",  # 4.4x to 4.57
    "rowwise_rep": "rowwise_split_input",  # 4.4x to 4.57
}
STYLES |= {alias: STYLES[name] for alias, name in ALIASES.items()}

STYLE_NAMES: tuple[str, ...] = tuple(STYLES)


def known_styles(own: Mapping[str, Any] | None = None) -> dict[str, Style]:
    """The table with a user's own styles on top: rows, or torch ``ParallelStyle``s, applied as they stand."""
    rows = {
        name: style if isinstance(style, Style) else Style(name, "applied as it stands", subtree=True, native=style)
        for name, style in (own or {}).items()
    }
    return {**STYLES, **rows}


def for_kind(style: Style, kind: Kind) -> Style:
    """`shard` on a linear cuts one of its two sides, and is the style that does; any other style is what it is."""
    if style.split is not Split.DIM or not kind.is_linear or style.dim > 1:
        return style
    cuts_output = (style.dim == 0) is (kind is Kind.LINEAR)
    side = _COLWISE if cuts_output else _ROWWISE
    return replace(side, name=style.name, sections=style.sections, local_sizes=style.local_sizes)


# What a mapping without `style` and a written `null` mean.
EDGES_ONLY = Style("edges only", "states edges and decides nothing else", claims=False)
REPLICATED_ON_PURPOSE = Style("null", "replicated on purpose", subtree=True)
