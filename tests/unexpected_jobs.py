"""What tests/test_apply.py runs on the pool: models built otherwise than the plan expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP

import parity
import tiny_models
from pool import build_mesh
from shardplan import apply_plan


class ScaledMLP(LlamaMLP):
    """A block that owns a parameter itself: each rank uses it for its part of the features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.alpha = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.alpha)
        return output


class ProjectedHead(LlamaForCausalLM):
    """Something between the final norm and the head, in a forward of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, **inputs: Any) -> Any:
        return CausalLMOutputWithPast(logits=self.lm_head(self.out_proj(self.model(**inputs).last_hidden_state)))


class TwiceHead(LlamaForCausalLM):
    """The head runs a second time, on something that the final gather did not give."""

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **inputs)
        output.logits = output.logits + self.lm_head(self.model.embed_tokens(input_ids))
        return output


def scaled_mlp() -> nn.Module:
    model = tiny_models.build("llama")
    torch.manual_seed(2)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp = ScaledMLP(model.config)  # type: ignore[union-attr,arg-type]
    return model


def built(cls: type) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = cls(tiny_models.config("llama"))
    return model


UNEXPECTED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a block's own parameter": (scaled_mlp, {".layers.*.mlp.alpha": "replicated_with_grad_allreduce"}),
    "a block's own parameter, null": (scaled_mlp, {".layers.*.mlp.alpha": None}),
    "a projection before the head": (lambda: built(ProjectedHead), {"out_proj": None}),
    "a head that runs twice": (lambda: built(TwiceHead), {}),
}


def unexpected(what: str, mesh: str, sequence_parallel: bool) -> list[str]:
    build, overrides = UNEXPECTED[what]
    reference = build()
    sharded = apply_plan(
        build(),
        "llama",
        build_mesh(mesh),
        overrides=overrides or None,
        sequence_parallel=sequence_parallel,
    )
    faults = []
    for length in (16, 5):
        inputs, targets = parity.make_inputs(parity.Batch(length=length))
        expected = parity.step(reference, inputs, targets)
        actual = parity.step(sharded, inputs, targets)
        faults += parity.same_logits(expected.logits, parity.whole(actual.logits))
    return faults + list(parity.same_gradients(reference, sharded))
