"""What tests/test_apply.py runs on the pool: one property of an applied model each."""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP

import parity
import tiny_models
from shardplan import PlanError, apply_plan, gathered_logits

IDS = torch.arange(32).view(2, 16) * 7 % tiny_models.VOCABULARY


# ---------------------------------------------------------------- refusals


def fingerprint(model: nn.Module) -> str:
    """Everything that applying a plan changes: parameters, hooks, classes, attributes."""
    facts = []
    for name, module in model.named_modules():
        facts.append((name, type(module).__name__, sorted(module.__dict__)))
        facts.append((len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                facts.append((key, id(parameter), type(parameter).__name__, parameter.detach().double().sum().item()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def refused(call: str) -> tuple[list[str], str, bool]:
    """The codes and the text of a refusal, and whether the model is as it was."""
    model = tiny_models.build("llama")
    PREPARATIONS.get(call, lambda model: None)(model)
    before = fingerprint(model)
    try:
        REFUSED_CALLS[call](model)
    except PlanError as error:
        return [d.code for d in error.diagnostics], str(error), fingerprint(model) == before
    return [], "", False


def _unequal_weights(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] += 1e-3 * dist.get_rank()


def _permuted_rows(model: nn.Module) -> None:
    """The same numbers in another order."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            weight = model.get_parameter("model.norm.weight")
            weight.copy_(weight.flip(0))


def _other_mode(model: nn.Module) -> None:
    apply_plan(model, "llama", parity.build_mesh("tp=2"), sequence_parallel=dist.get_rank() == 1)


def _one_rank_refuses(model: nn.Module) -> None:
    apply_plan(model, "llama" if dist.get_rank() else {"nothing": "colwise"}, parity.build_mesh("tp=2"))


def _smaller_mesh(model: nn.Module) -> None:
    apply_plan(model, "llama", DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp")))


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Callable[[nn.Module], Any]:
    return lambda model: apply_plan(model, "llama", init_device_mesh("cpu", shape, mesh_dim_names=names))


def _on_tp(plan: Any = "llama", **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: apply_plan(model, plan, parity.build_mesh("tp=2"), **options)


def _file(text: str) -> Callable[[nn.Module], Any]:
    def call(model: nn.Module) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.yaml"
            path.write_text(text)
            apply_plan(model, path, parity.build_mesh("tp=2"))

    return call


PREPARATIONS: dict[str, Callable[[nn.Module], None]] = {
    "unequal weights": _unequal_weights,
    "permuted rows": _permuted_rows,
}
REFUSED_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "unequal weights": _on_tp(),
    "permuted rows": _on_tp(),
    "ranks in different modes": _other_mode,
    "one rank refuses": _one_rank_refuses,
    "a mesh smaller than the world": _smaller_mesh,
    "an unnamed mesh": _mesh((2,), None),
    "an unknown axis": _mesh((1, 2), ("dp", "ep")),
    "two names for dp": _mesh((1, 1, 2), ("dp", "fsdp", "tp")),
    "a plan for another model": _on_tp("gemma3"),
    "a missing file": _on_tp("nowhere.yaml"),
    "a directory": _on_tp("/"),
    "no shipped plan of that name": _on_tp("lama"),
    "not YAML": _file("format: 1\nrules: {a: [\n"),
    "a YAML list": _file("- format: 1\n"),
    "an empty file": _file(""),
    "an unknown key": _file("format: 1\nrulez: {}\n"),
    "a wrong type": _file("format: 1\nrules: [a, b]\n"),
    "an empty dict": _on_tp({}),
    "a dict of numbers": _on_tp({"model.norm": 3}),
    "an unknown style": _on_tp(["llama", {".layers.*.mlp.up_proj": "colwize"}]),
    "mixed precision without dp": _on_tp(mixed_precision={"param": "bfloat16"}),
    "offload without dp": _on_tp(cpu_offload=True),
    "recompute of nothing": _on_tp(recompute=[".layer.*"]),
    "recompute as a flag": _on_tp(recompute=True),
}


def applied_twice() -> tuple[list[str], bool]:
    mesh = parity.build_mesh("tp=2")
    model = apply_plan(tiny_models.build("llama"), "llama", mesh)
    before = fingerprint(model)
    try:
        apply_plan(model, "llama", mesh)
    except PlanError as error:
        return [d.code for d in error.diagnostics], fingerprint(model) == before
    return [], False


# ---------------------------------------------------------------- properties


def odd_vocabulary(vocabulary: int, tied: bool, mesh: str) -> list[str]:
    """C39: a vocabulary that tp does not divide: bit-equal weights, whole logits, exact gradients."""
    changes = {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    reference = tiny_models.build("llama", **changes)
    sharded = apply_plan(tiny_models.build("llama", **changes), "llama", parity.build_mesh(mesh))
    faults = [
        f"{name} is not bit-equal"
        for name, parameter in reference.named_parameters()
        if not torch.equal(parity.whole(sharded.get_parameter(name).detach()), parameter.detach())
    ]
    rows = parity.rows_of(IDS.repeat(2, 1) % vocabulary, parity.build_mesh(mesh))
    expected = parity.step(reference, {"input_ids": IDS.repeat(2, 1) % vocabulary}, IDS.repeat(2, 1) % vocabulary)
    actual = parity.step(sharded, {"input_ids": rows}, rows)
    if actual.logits.shape[-1] != vocabulary:
        faults.append(f"logits are {actual.logits.shape[-1]} wide")
    faults += parity._same_logits(parity.rows_of(expected.logits, parity.build_mesh(mesh)), parity.whole(actual.logits))
    return faults + list(parity.same_gradients(reference, sharded))


def embedding_rows(vocabulary: int) -> int:
    sharded = apply_plan(tiny_models.build("llama", vocab_size=vocabulary), "llama", parity.build_mesh("tp=2"))
    weight = sharded.get_parameter("model.embed_tokens.weight")
    assert isinstance(weight, DTensor)
    return weight.to_local().shape[0]


def padding_row(padding_idx: int) -> list[str]:
    """The embedding's padding row gets no gradient, whichever rank holds it."""
    reference = tiny_models.build("llama", pad_token_id=padding_idx)
    sharded = apply_plan(tiny_models.build("llama", pad_token_id=padding_idx), "llama", parity.build_mesh("tp=2"))
    ids = IDS.clone()
    ids[:, ::3] = padding_idx
    for model in (reference, sharded):
        parity.step(model, {"input_ids": ids}, IDS)
    return list(parity.same_gradients(reference, sharded))


def local_rows(mesh: str) -> tuple[int, ...]:
    """The local shape of a weight with 64 rows under FSDP2."""
    sharded = apply_plan(tiny_models.build("llama"), "llama", parity.build_mesh(mesh))
    weight = sharded.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(weight, DTensor)
    return tuple(weight.to_local().shape)


def from_meta(model_name: str, mesh: str) -> list[str]:
    """A model applied on the meta device and filled afterwards does what one applied with weights does."""
    reference = tiny_models.build(model_name)
    device_mesh = parity.build_mesh(mesh)
    sharded = apply_plan(tiny_models.build_meta(model_name), tiny_models.plan_of(model_name), device_mesh)
    sharded.to_empty(device="cpu")
    whole = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    set_model_state_dict(sharded, whole, options=StateDictOptions(full_state_dict=True, strict=False))
    for name, buffer in reference.named_buffers():
        sharded.get_buffer(name).copy_(buffer)
    batch = parity.Batch()
    faults = list(parity.compare_batch(reference, sharded, device_mesh, batch, seed=0))
    return faults + list(parity.compare_training(reference, sharded, device_mesh))


def generated(model_name: str, mesh: str, sequence_parallel: bool) -> tuple[list[int], list[int]]:
    """Tokens of the unsharded and of the sharded model."""
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = IDS[:1, :8]
    reference = tiny_models.build(model_name)
    sharded = apply_plan(
        tiny_models.build(model_name), "auto", parity.build_mesh(mesh), sequence_parallel=sequence_parallel
    )
    with torch.no_grad(), gathered_logits(sharded):
        actual = sharded.generate(prompt, **arguments)  # type: ignore[operator]
    return reference.generate(prompt, **arguments)[0].tolist(), actual[0].tolist()  # type: ignore[operator]


def kinds_of_logits() -> list[str]:
    """Sharded, whole inside `gathered_logits`, sharded again; and whole by the plan."""
    mesh = parity.build_mesh("tp=2")
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
    sharded = apply_plan(tiny_models.build("llama"), "llama", parity.build_mesh("tp=2"), sequence_parallel=True)
    faults = []
    outputs = [model(input_ids=IDS, output_hidden_states=True).hidden_states for model in (reference, sharded)]
    for number, (expected, actual) in enumerate(zip(*outputs, strict=True)):
        faults += [f"layer {number}: {fault}" for fault in parity._same_logits(expected, actual)]
    for states in outputs:
        sum(state.square().mean() for state in states).backward()
    return faults + list(parity.same_gradients(reference, sharded))


def second_reader() -> list[str]:
    """A value head on the final hidden states beside the sharded head: both gradients are right."""
    reference = tiny_models.build("llama")
    sharded = apply_plan(tiny_models.build("llama"), "llama", parity.build_mesh("tp=2"), sequence_parallel=True)
    for model in (reference, sharded):
        states = model.model(input_ids=IDS).last_hidden_state  # type: ignore[operator,union-attr]
        logits = model.lm_head(states)  # type: ignore[operator]
        (parity.cross_entropy(logits, IDS) + states.square().mean()).backward()
    return list(parity.same_gradients(reference, sharded))


def copied_and_differentiated() -> list[str]:
    """Without FSDP2: a deep copy, and `torch.autograd.grad` instead of `backward`, sum gradients too."""
    reference = tiny_models.build("qwen3")
    original = apply_plan(tiny_models.build("qwen3"), "qwen2", parity.build_mesh("tp=2"), sequence_parallel=True)
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
    sharded = apply_plan(sharded, "qwen2", parity.build_mesh(mesh), sequence_parallel=True)
    for model in (reference, sharded):
        parity.step(model, {"input_ids": IDS}, IDS)
    frozen = [n for n, p in sharded.named_parameters() if (p.grad is None) is (trained in n)]
    return frozen + list(parity.same_gradients(reference, sharded))


# ---------------------------------------------------------------- models built otherwise than the plan expects


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
        parity.build_mesh(mesh),
        overrides=overrides or None,
        sequence_parallel=sequence_parallel,
    )
    faults = []
    for length in (16, 5):
        inputs, targets = parity.make_inputs(parity.Batch(length=length))
        expected = parity.step(reference, inputs, targets)
        actual = parity.step(sharded, inputs, targets)
        faults += parity._same_logits(expected.logits, parity.whole(actual.logits))
    return faults + list(parity.same_gradients(reference, sharded))


def largest_logit_difference(positions: str) -> float:
    """C35: sequence parallel; positions absent, given, or restarting as packed sequences have them."""
    inputs, _ = parity.make_inputs(parity.Batch(positions=positions))
    reference = tiny_models.build("llama")
    sharded = apply_plan(tiny_models.build("llama"), "llama", parity.build_mesh("tp=2"), sequence_parallel=True)
    with torch.no_grad():
        return (reference(**inputs).logits - parity.whole(sharded(**inputs).logits)).abs().max().item()
