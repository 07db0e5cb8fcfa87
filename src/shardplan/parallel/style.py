"""A compiled module as a `ParallelStyle`: its parameters become DTensors, its edges become hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardplan.compiled import CompiledModule
from shardplan.edges import Edge
from shardplan.parallel.local import Multiplies, read_locally
from shardplan.parallel.sizes import localise
from shardplan.parallel.stream import Stream, full_positions

Identity = tuple[int, str]


@dataclass
class LocalStyle(ParallelStyle):
    """Applies one `CompiledModule`.

    Attributes:
        compiled: what to do.
        stream: the model's residual stream.
        placed: parameters already placed, by identity and section; a tied one stays one. Shared by a model's styles.
        linears: the column-wise ones in the block that the module is, or the module itself; applied already.
    """

    compiled: CompiledModule
    stream: Stream
    placed: dict[Identity, nn.Parameter] = field(default_factory=dict)
    linears: Sequence[nn.Module] = ()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.compiled.native is not None:
            applied: nn.Module = self.compiled.native._apply(module, device_mesh)
            return applied
        split_sections(module, self.compiled)
        for parameter in self.compiled.parameters:
            placement = Shard(parameter.placement.dim or 0) if parameter.sharded else Replicate()
            for name in parameter.stored_names:
                identity = parameter.identity, name if parameter.sections else ""
                self._place(module, name, placement, device_mesh, identity)
        if self.compiled.parameters or self.compiled.reads_children:
            read_locally(module, self.compiled, self.stream)
        localise(module, self.compiled.local_sizes, self.stream.ranks)
        if self.compiled.counted_once:
            module.register_forward_hook(partial(_share_output, self.stream.ranks.size))
        if self.compiled.positions and self.stream.cut_by_embedding:
            module.register_forward_pre_hook(partial(full_positions, self.stream), with_kwargs=True)
        if self.compiled.input is not None:
            linears = [linear for linear in self.linears if isinstance(linear, Multiplies)]
            hook = partial(_convert_input, self.stream, self.compiled.input, linears)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            if linears:
                module.register_forward_hook(partial(_forget_ahead, linears), always_call=True)
        if self.compiled.output is not None:
            hook = partial(_convert_output, self.stream, self.compiled.output)
            module.register_forward_hook(hook, with_kwargs=True)
        return module

    def _place(self, module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh, identity: Identity) -> None:
        """Each rank keeps its part of its own weights: nothing is sent."""
        if identity not in self.placed:
            current = module._parameters[name]
            assert current is not None
            local = distribute_tensor(current.detach(), mesh, [placement], src_data_rank=None)
            self.placed[identity] = nn.Parameter(local, requires_grad=current.requires_grad)
        module._parameters[name] = self.placed[identity]


def split_sections(module: nn.Module, compiled: CompiledModule) -> None:
    """Put the sections of packed parameters, each a parameter of its own, in the place of the whole."""
    packed = {parameter.name: parameter for parameter in compiled.parameters if parameter.sections}
    if not packed:
        return
    before = dict(module._parameters)
    module._parameters.clear()
    for name, current in before.items():
        if name not in packed or current is None:
            module._parameters[name] = current
            continue
        dim = packed[name].placement.dim or 0
        for stored, section in zip(packed[name].stored_names, packed[name].sections, strict=True):
            part = current.detach().narrow(dim, section.start, section.length).clone()
            module._parameters[stored] = nn.Parameter(part, requires_grad=current.requires_grad)


def _convert_input(
    stream: Stream,
    edge: Edge,
    linears: Sequence[Multiplies],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert ``hidden_states`` where it goes by name, else the first argument.

    A module may be given it twice, as torchtune gives its attention what queries and what keys are made of.
    """
    if "hidden_states" not in kwargs and not args:
        raise TypeError(
            f"{type(module).__name__} was called without a positional argument or hidden_states, "
            f"but its plan converts its input ({edge.conversion})"
        )
    given = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    converted = stream.convert(given, edge, linears)
    by_position = tuple(converted if argument is given else argument for argument in args)
    return by_position, {name: converted if argument is given else argument for name, argument in kwargs.items()}


def _forget_ahead(linears: Sequence[Multiplies], module: nn.Module, args: Any, output: Any) -> None:
    """A weight that was read for a forward that did not use it, or raised, is not there for the next one."""
    for linear in linears:
        if linear.tp_ahead is not None:
            linear.tp_ahead = None


def _convert_output(
    stream: Stream, edge: Edge, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Convert the output, or the first element of a tuple of them."""
    given = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(output, tuple):
        return (_convert_by_sequence(stream, edge, given, output[0]), *output[1:])
    return _convert_by_sequence(stream, edge, given, output)


def _convert_by_sequence(stream: Stream, edge: Edge, given: Any, output: Tensor) -> Tensor:
    """Experts may give all tokens in one dim, where an edge wants the sequence in the second one, as it came in."""
    if not stream.cut or output.ndim != 2 or not isinstance(given, Tensor) or given.ndim <= 2:
        return stream.convert(output, edge)
    if output.shape[0] != given.shape[:-1].numel():
        return stream.convert(output, edge)
    return stream.convert(output.view(*given.shape[:-1], output.shape[-1]), edge).flatten(0, -2)


def _share_output(ranks: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output / ranks


def logits_as_dtensor(mesh: DeviceMesh, vocabulary: int, output: Tensor) -> DTensor:
    """(batch, sequence, vocabulary / tp) per rank -> one DTensor, ``Shard(-1)``; no communication."""
    shape = torch.Size((*output.shape[:-1], vocabulary))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(output, mesh, [Shard(output.ndim - 1)], run_check=False, shape=shape, stride=stride)
