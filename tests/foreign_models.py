"""Models that are not transformers', with the names and the calls of torchtune and torchtitan, and their plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import parity
import tolerances
from pool import build_mesh
from shardplan import apply_plan

WIDTH, INNER, HEAD_DIM, WORDS = 32, 48, 8, 64


class Attention(nn.Module):
    """Four heads, two KV heads; queries of one input, keys and values of another, as torchtune's takes them."""

    def __init__(self, names: tuple[str, str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, given, taken in zip(names, (WIDTH, WIDTH // 2, WIDTH // 2, WIDTH), (WIDTH,) * 4, strict=True):
            self.add_module(name, nn.Linear(taken, given, bias=False))

    def forward(self, x: Tensor, y: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        query, key, value, output = (self.get_submodule(name) for name in self.names)
        q, k, v = (
            made.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for made in (query(x), key(y), value(y))
        )  # as many heads as this rank has
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True, enable_gqa=True)
        given: Tensor = output(mixed.transpose(1, 2).flatten(-2))
        return given


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return given


class TuneLayer(nn.Module):
    """torchtune's layer: attention is given its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sa_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn = Attention(("q_proj", "k_proj", "v_proj", "output_proj"))
        self.mlp = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        h = self.sa_norm(x)
        h = self.attn(h, h) + x
        out: Tensor = h + self.mlp(self.mlp_norm(h))
        return out


class TitanLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(("wq", "wk", "wv", "wo"))
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Decoder(nn.Module):
    """Two layers; torchtitan keeps them in a dict. Weights are the same in every process."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        layers = [layer() for _ in range(2)]
        self.layers: Any = (
            nn.ModuleDict({str(n): one for n, one in enumerate(layers)})
            if layer is TitanLayer
            else nn.ModuleList(layers)
        )
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            h = layer(h)
        logits: Tensor = self.output(self.norm(h))
        return logits


def torchtune(sequence_parallel: bool) -> dict[str, Any]:
    """torchtune's plans for Llama 3: of inference, and of training, where inputs are declared by position."""
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
        "layers.*.attn.q_proj": ColwiseParallel(),
        "layers.*.attn.k_proj": ColwiseParallel(),
        "layers.*.attn.v_proj": ColwiseParallel(),
        "layers.*.attn.output_proj": RowwiseParallel(output_layouts=stream),
        "layers.*.mlp.w1": ColwiseParallel(),
        "layers.*.mlp.w2": RowwiseParallel(output_layouts=stream),
        "layers.*.mlp.w3": ColwiseParallel(),
    }
    if sequence_parallel:
        plan |= {
            "norm": SequenceParallel(),
            "layers.*.attn": _gathered(2),
            "layers.*.mlp": _gathered(1),
            "layers.*.sa_norm": SequenceParallel(),
            "layers.*.mlp_norm": SequenceParallel(),
        }
    return plan


def titan_layer() -> dict[str, Any]:
    """torchtitan's plan for one layer, by names within it."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": _gathered(4),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": _gathered(1),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def torchtitan() -> dict[str, Any]:
    """torchtitan's plan for Llama 3 as one, by names within the model."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        **{f"layers.*.{name}": style for name, style in titan_layer().items()},
    }


def _gathered(inputs: int) -> PrepareModuleInput:
    """The first of so many inputs, from the cut sequence to the whole one."""
    others = (None,) * (inputs - 1)
    return PrepareModuleInput(input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others))


PLANS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "torchtune": (TuneLayer, torchtune(False)),
    "torchtune, sequence parallel": (TuneLayer, torchtune(True)),
    "torchtitan": (TitanLayer, torchtitan()),
}


def meta(layer: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return Decoder(layer)


def compare(name: str, mesh: str) -> list[str]:
    """Logits and every gradient of a model under its plan against the unsharded one; two lengths added up."""
    layer, plan = PLANS[name]
    reference, device_mesh = Decoder(layer), build_mesh(mesh)
    sharded = apply_plan(Decoder(layer), plan, device_mesh)
    faults = []
    for number, length in enumerate((16, 5)):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, WORDS, (4, length), generator=generator)
        expected, own = reference(tokens), parity.rows_of(tokens, device_mesh)
        actual = sharded(own)
        for logits, ids in ((expected, tokens), (actual, own)):
            nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        if (parity.rows_of(expected, device_mesh) - actual).abs().max() > tolerances.LOGITS:
            faults.append(f"logits of length {length} differ")
    return faults + list(parity.same_gradients(reference, sharded))
