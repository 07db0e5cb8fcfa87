"""The floor: a Llama with collectives written by hand on plain tensors, and nothing else. One micro-batch, even sizes.

What Megatron-LM does (Shoeybi et al. 2019; with ``sequence_parallel``, Korthikanti et al. 2022), in as few lines as it
takes. It is no library: weights are cut in place, checkpoints and tied weights are nobody's concern.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Of (batch, sequence, features), along the sequence."""
    size = group.size()
    stacked = torch.cat(x.chunk(size, 1), 0).contiguous()
    part = torch.empty(x.shape[0], x.shape[1] // size, x.shape[2], dtype=x.dtype)
    dist.reduce_scatter_tensor(part, stacked, group=group)
    return part


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


class _Into(Function):
    """Before column-wise linears: the gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _OutOf(Function):
    """Behind row-wise linears: the output is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _Cut(Function):
    """Where the stream begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def sum_norms(norms: Iterable[Any], group: ProcessGroup) -> None:
    """After a backward with a cut stream: the gradients of norms, of which each rank has a part, in one collective."""
    grads = [norm.weight.grad for norm in norms]
    own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]  # FSDP2's shards, or whole
    flat = _all_reduce(torch.cat([grad.flatten() for grad in own]), group)
    for grad, summed in zip(own, flat.split([grad.numel() for grad in own]), strict=True):
        grad.copy_(summed.view_as(grad))


def by_hand(model: Any, group: ProcessGroup, sequence_parallel: bool) -> Any:
    """Shard a transformers Llama; its head gives this rank's part of the logits.

    What is left to do after a backward is the model's ``after_backward``.
    """
    layers = model.model.layers
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        _cut((attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj), 0, group)
        _cut((attention.o_proj, mlp.down_proj), 1, group)
        into, out_of = (_Gather, _Scatter) if sequence_parallel else (_Into, _OutOf)
        attention.register_forward_pre_hook(partial(_by_name, into, group), with_kwargs=True)
        attention.register_forward_hook(lambda _, args, out, f=out_of: (f.apply(out[0], group), *out[1:]))
        mlp.register_forward_pre_hook(lambda _, args, f=into: (f.apply(args[0], group),))
        mlp.register_forward_hook(lambda _, args, out, f=out_of: f.apply(out, group))
    _cut((model.lm_head,), 0, group)
    if sequence_parallel:
        norms = [module for name, module in model.named_modules() if name.endswith("norm")]
        model.after_backward = partial(sum_norms, norms, group)
        layers[0].register_forward_pre_hook(lambda _, args: (_Cut.apply(args[0], group), *args[1:]))
        model.model.norm.register_forward_hook(lambda _, args, out: _Gather.apply(out, group))
    else:
        model.lm_head.register_forward_pre_hook(lambda _, args: (_Into.apply(args[0], group),))
    _cut((model.model.embed_tokens,), 0, group)
    model.model.embed_tokens.forward = partial(_embed, model.model.embed_tokens, group)
    return model


def _by_name(into: Any, group: ProcessGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "hidden_states": into.apply(kwargs["hidden_states"], group)}


def _cut(modules: Iterable[Any], dim: int, group: ProcessGroup) -> None:
    for module in modules:
        part = module.weight.detach().chunk(group.size(), dim)[group.rank()]
        module.weight = nn.Parameter(part.clone())


def _embed(embedding: Any, group: ProcessGroup, ids: Tensor) -> Any:
    rows = embedding.weight.shape[0]
    own = ids - group.rank() * rows
    elsewhere = (own < 0) | (own >= rows)
    found = F.embedding(own.masked_fill(elsewhere, 0), embedding.weight)
    return _OutOf.apply(found.masked_fill(elsewhere.unsqueeze(-1), 0), group)
