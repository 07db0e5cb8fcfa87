"""Where the residual stream begins, runs and ends, and the conversions at a module's edges."""

from __future__ import annotations

from functools import cached_property

from shardplan.inventory import ancestors
from shardplan.layouts import REPLICATE, STREAM, Conversion, Layout
from shardplan.resolved import ResolvedModule, ResolvedPlan
from shardplan.styles import Kind


class ResidualStream:
    """The stream as a plan lays it: cut at the input of the first decoder layer, gathered behind the final norm.

    Attributes:
        cuts: modules at whose input it is cut; a right plan has one, the first decoder layer.
        gathers: modules at whose output it is gathered; a right plan has one, the final norm.
    """

    def __init__(self, resolved: ResolvedPlan) -> None:
        self._resolved = resolved
        outside = [module for module in resolved.modules if module.block is None and module.rule is not None]
        self.cuts = tuple(module for module in outside if _turns(input_conversion(module), REPLICATE, STREAM))
        self.gathers = tuple(module for module in outside if _turns(output_conversion(module), STREAM, REPLICATE))

    @cached_property
    def layers(self) -> str | None:
        """The list of decoder layers: around the cut, or around the first block where nothing cuts the stream."""
        around = self.cuts[0].fqn if self.cuts else self._first_layer()
        return next(ancestors(around), None) if around else None

    @cached_property
    def decoder(self) -> str | None:
        """The module whose forward runs the layers."""
        if self.layers is None:
            return None
        by_fqn = self._resolved.inventory.by_fqn
        return next((fqn for fqn in (self.layers, *ancestors(self.layers)) if not by_fqn[fqn].container), None)

    @cached_property
    def cut_by_embedding(self) -> bool:
        """Whether the embedding's output is the stream, so that nothing need cut it later."""
        embedding = self._resolved.embedding
        given = output_conversion(embedding) if embedding else None
        return given is not None and given.target == STREAM

    @property
    def gather(self) -> str | None:
        return self.gathers[0].fqn if self.gathers else None

    def carries(self, fqn: str) -> bool:
        """Whether a module runs inside one of the layers, and in no region where the stream is whole."""
        inside = self.layers is not None and fqn.startswith(f"{self.layers}.")
        return inside and self.regions.isdisjoint(ancestors(fqn))

    @cached_property
    def around_blocks(self) -> frozenset[str]:
        """Blocks, and the modules that hold some."""
        blocks = [m.fqn for m in self._resolved.modules if m.style is not None and m.style.opens_block]
        return frozenset(name for fqn in blocks for name in (fqn, *ancestors(fqn)))

    @cached_property
    def regions(self) -> frozenset[str]:
        """Modules where all is whole: they gather the stream for what is below them, and cut it again behind.

        They hold no blocks. A Linear from the stream's width into another one need only gather, as what it gives is
        not the stream, and one back from there need only cut.
        """
        outside = (m for m in self._resolved.modules if m.block is None and m.fqn not in self.around_blocks)
        return frozenset(module.fqn for module in outside if _whole_inside(module))

    def _first_layer(self) -> str | None:
        """The member of a list of modules that holds the first block, or is it."""
        by_fqn = self._resolved.inventory.by_fqn
        block = next((m.fqn for m in self._resolved.modules if m.style is not None and m.style.opens_block), None)
        if block is None:
            return None
        return next((fqn for fqn in (block, *ancestors(block)) if fqn and by_fqn[next(ancestors(fqn))].container), None)


def input_conversion(module: ResolvedModule) -> Conversion | None:
    """The conversion at a module's input: what its rule states, else its style's, else none.

    Inside a block a style's own edges give way to the block's; what a rule states still holds.
    """
    return _conversion(module, "input")


def output_conversion(module: ResolvedModule) -> Conversion | None:
    """The conversion at a module's output; see `input_conversion`."""
    return _conversion(module, "output")


def _conversion(module: ResolvedModule, side: str) -> Conversion | None:
    if module.rule is None or module.style is None:
        return None
    if side == "input" and takes_no_activation(module):
        return None
    own: Conversion | None = getattr(module.style, side) if module.block is None else None
    return module.stated[side] or own


def takes_no_activation(module: ResolvedModule) -> str:
    """What a module takes where that is no activation, and an edge at its input converts nothing; else ""."""
    if module.info.kind is Kind.EMBEDDING:
        return "takes ids"
    if module.style is not None and module.style.positions:
        return "takes an activation for its dtype and device alone"
    return ""


def _whole_inside(module: ResolvedModule) -> bool:
    gathers = _turns(input_conversion(module), STREAM, REPLICATE)
    cuts = _turns(output_conversion(module), REPLICATE, STREAM)
    changes_width = module.info.kind.is_linear and len(set(module.info.features)) > 1
    return gathers or cuts if changes_width else gathers and cuts


def _turns(conversion: Conversion | None, source: Layout, target: Layout) -> bool:
    return conversion is not None and (conversion.source, conversion.target) == (source, target)
