"""What tests/test_apply.py runs on the pool: one property of an applied model each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaMLP

import parity
import tiny_models
from pool import build_mesh
from shardplan import apply_plan, gathered_logits

IDS = torch.arange(32).view(2, 16) * 7 % tiny_models.VOCABULARY


def odd_vocabulary(vocabulary: int, tied: bool, mesh: str) -> list[str]:
    """C39: a vocabulary that tp does not divide: bit-equal weights, whole logits, exact gradients."""
    changes = {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    reference = tiny_models.build("llama", **changes)
    sharded = apply_plan(tiny_models.build("llama", **changes), "llama", build_mesh(mesh))
    faults = [
        f"{name} is not bit-equal"
        for name, parameter in reference.named_parameters()
        if not torch.equal(parity.whole(sharded.get_parameter(name).detach()), parameter.detach())
    ]
    rows = parity.rows_of(IDS.repeat(2, 1) % vocabulary, build_mesh(mesh))
    expected = parity.step(reference, {"input_ids": IDS.repeat(2, 1) % vocabulary}, IDS.repeat(2, 1) % vocabulary)
    actual = parity.step(sharded, {"input_ids": rows}, rows)
    if actual.logits.shape[-1] != vocabulary:
        faults.append(f"logits are {actual.logits.shape[-1]} wide")
    faults += parity.same_logits(parity.rows_of(expected.logits, build_mesh(mesh)), parity.whole(actual.logits))
    return faults + list(parity.same_gradients(reference, sharded))


def embedding_rows(vocabulary: int) -> int:
    sharded = apply_plan(tiny_models.build("llama", vocab_size=vocabulary), "llama", build_mesh("tp=2"))
    weight = sharded.get_parameter("model.embed_tokens.weight")
    assert isinstance(weight, DTensor)
    return weight.to_local().shape[0]


def padding_row(padding_idx: int) -> list[str]:
    """The embedding's padding row gets no gradient, whichever rank holds it."""
    reference = tiny_models.build("llama", pad_token_id=padding_idx)
    sharded = apply_plan(tiny_models.build("llama", pad_token_id=padding_idx), "llama", build_mesh("tp=2"))
    ids = IDS.clone()
    ids[:, ::3] = padding_idx
    for model in (reference, sharded):
        parity.step(model, {"input_ids": ids}, IDS)
    return list(parity.same_gradients(reference, sharded))


def local_rows(mesh: str) -> tuple[int, ...]:
    """The local shape of a weight with 64 rows under FSDP2."""
    sharded = apply_plan(tiny_models.build("llama"), "llama", build_mesh(mesh))
    weight = sharded.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(weight, DTensor)
    return tuple(weight.to_local().shape)


def from_meta(model_name: str, mesh: str) -> list[str]:
    """A model applied on the meta device and filled afterwards does what one applied with weights does."""
    reference = tiny_models.build(model_name)
    device_mesh = build_mesh(mesh)
    sharded = apply_plan(tiny_models.build_meta(model_name), tiny_models.plan_of(model_name), device_mesh)
    sharded.to_empty(device="cpu")
    whole = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    set_model_state_dict(sharded, whole, options=StateDictOptions(full_state_dict=True, strict=False))
    for name, buffer in reference.named_buffers():
        sharded.get_buffer(name).copy_(buffer)
    batch, compared = parity.Batch(), parity.Reference(reference)
    faults = list(parity.compare_batch(compared, sharded, device_mesh, batch, seed=0))
    return faults + list(parity.compare_training(compared, sharded, device_mesh))


def generated(model_name: str, mesh: str, sequence_parallel: bool) -> tuple[list[int], list[int]]:
    """Tokens of the unsharded and of the sharded model."""
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = IDS[:1, :8]
    reference = tiny_models.build(model_name)
    sharded = apply_plan(tiny_models.build(model_name), "auto", build_mesh(mesh), sequence_parallel=sequence_parallel)
    with torch.no_grad(), gathered_logits(sharded):
        actual = sharded.generate(prompt, **arguments)  # type: ignore[operator]
    return reference.generate(prompt, **arguments)[0].tolist(), actual[0].tolist()  # type: ignore[operator]


def kinds_of_logits() -> list[str]:
    """Sharded, whole inside `gathered_logits`, sharded again; and whole by the plan."""
    mesh = build_mesh("tp=2")
    model = apply_plan(tiny_models.build("llama"), "llama", mesh)
    kinds = [type(model(input_ids=IDS).logits).__name__]
    with gathered_logits(model):
        kinds.append(type(model(input_ids=IDS).logits).__name__)
    kinds.append(type(model(input_ids=IDS).logits).__name__)
    gathered = apply_plan(tiny_models.build("llama"), "llama", mesh, overrides={"lm_head": "colwise_gather_output"})
    output = gathered(input_ids=IDS, labels=IDS)
    output.loss.backward()
    return [*kinds, type(output.logits).__name__]


def hidden_states() -> list[str]:
    """Asked for all hidden states, a sequence-parallel model hands out whole ones, and gradients through them."""
    reference = tiny_models.build("llama")
    sharded = apply_plan(tiny_models.build("llama"), "llama", build_mesh("tp=2"), sequence_parallel=True)
    faults = []
    outputs = [model(input_ids=IDS, output_hidden_states=True).hidden_states for model in (reference, sharded)]
    for number, (expected, actual) in enumerate(zip(*outputs, strict=True)):
        faults += [f"layer {number}: {fault}" for fault in parity.same_logits(expected, actual)]
    for states in outputs:
        sum(state.square().mean() for state in states).backward()
    return faults + list(parity.same_gradients(reference, sharded))


def second_reader() -> list[str]:
    """A value head on the final hidden states beside the sharded head: both gradients are right."""
    reference = tiny_models.build("llama")
    sharded = apply_plan(tiny_models.build("llama"), "llama", build_mesh("tp=2"), sequence_parallel=True)
    for model in (reference, sharded):
        states = model.model(input_ids=IDS).last_hidden_state  # type: ignore[operator,union-attr]
        logits = model.lm_head(states)  # type: ignore[operator]
        (parity.cross_entropy(logits, IDS) + states.square().mean()).backward()
    return list(parity.same_gradients(reference, sharded))


def copied_and_differentiated() -> list[str]:
    """Without FSDP2: a deep copy, and `torch.autograd.grad` instead of `backward`, sum gradients too."""
    reference = tiny_models.build("qwen3")
    original = apply_plan(tiny_models.build("qwen3"), "qwen2", build_mesh("tp=2"), sequence_parallel=True)
    sharded = copy.deepcopy(original)
    parity.step(reference, {"input_ids": IDS}, IDS)
    parameters = dict(sharded.named_parameters())
    loss = parity.cross_entropy(sharded(input_ids=IDS).logits, IDS)
    for parameter, gradient in zip(
        parameters.values(), torch.autograd.grad(loss, list(parameters.values())), strict=True
    ):
        parameter.grad = gradient
    untouched = [name for name, parameter in original.named_parameters() if parameter.grad is not None]
    return untouched + list(parity.same_gradients(reference, sharded))


def partly_frozen(mesh: str, trained: str) -> list[str]:
    """Only the parameters whose name has ``trained`` in it are trained; the others get no gradient."""
    reference = tiny_models.build("qwen3")
    sharded = tiny_models.build("qwen3")
    for model in (reference, sharded):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
    sharded = apply_plan(sharded, "qwen2", build_mesh(mesh), sequence_parallel=True)
    for model in (reference, sharded):
        parity.step(model, {"input_ids": IDS}, IDS)
    frozen = [n for n, p in sharded.named_parameters() if (p.grad is None) is (trained in n)]
    return frozen + list(parity.same_gradients(reference, sharded))


def largest_logit_difference(positions: str) -> float:
    """C35: sequence parallel; positions absent, given, or restarting as packed sequences have them."""
    inputs, _ = parity.make_inputs(parity.Batch(positions=positions))
    reference = tiny_models.build("llama")
    sharded = apply_plan(tiny_models.build("llama"), "llama", build_mesh("tp=2"), sequence_parallel=True)
    with torch.no_grad():
        return (reference(**inputs).logits - parity.whole(sharded(**inputs).logits)).abs().max().item()


class Peeking(LlamaMLP):
    """An MLP with a method beside ``forward`` that computes with a child's weight, as Gemma 3n's layers have."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.gate_proj.weight)


def read_beside_forward() -> bool:
    """Whether such a method gives this rank's part of what it gives unsharded."""
    mesh = build_mesh("tp=2")
    model: Any = tiny_models.build("llama")
    mlp = model.model.layers[0].mlp
    mlp.__class__ = Peeking
    x = torch.randn(2, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = mlp.gated(x).detach().chunk(2, -1)[mesh.get_local_rank()]
    apply_plan(model, "llama", mesh, sequence_parallel=False)
    return torch.equal(mlp.gated(x).detach(), expected)
