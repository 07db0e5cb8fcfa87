"""What tests/test_options.py runs on the pool: options of `apply_plan`, Python plans, models wrapped before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import parity
import tiny_models
from apply_jobs import IDS
from pool import build_mesh
from shardplan import Style, apply_plan
from shardplan.styles import Gradient

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# ---------------------------------------------------------------- mixed precision, offload, recomputation


def precision(mesh: str) -> dict[str, Any]:
    """Dtypes in use under bf16 parameters and fp32 reduction, and the difference from the fp32 loss."""
    reference = tiny_models.build("llama")
    sharded = apply_plan(
        tiny_models.build("llama"), "llama", build_mesh(mesh), sequence_parallel=True, mixed_precision=BF16
    )
    seen: dict[str, Any] = {}
    projection = sharded.get_submodule("model.layers.0.mlp.up_proj")
    projection.register_forward_hook(lambda module, args, output: seen.update(activation=output.dtype))
    expected = parity.step(reference, {"input_ids": IDS}, IDS).loss
    actual = parity.step(sharded, {"input_ids": IDS}, IDS).loss
    tables, own = (m.get_buffer("model.rotary_emb.inv_freq") for m in (reference, sharded))
    return {
        **seen,
        "parameters": {p.dtype for p in sharded.parameters()},
        "gradients": {p.grad.dtype for p in sharded.parameters() if p.grad is not None},
        "tables": (own.dtype, torch.equal(tables, own)),
        "loss": abs(actual.item() - expected.item()) / expected.item(),
    }


class Fp32Rotary(LlamaRotaryEmbedding):
    """Hands out its tables in fp32 whatever the activations are, as some remote-code models do."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(x.float(), position_ids)
        return cos, sin


def table_dtypes() -> set[torch.dtype]:
    """The dtype in which position tables reach the decoder layers under bf16 parameters."""
    model = tiny_models.build("llama")
    model.model.rotary_emb = Fp32Rotary(model.config)  # type: ignore[union-attr,arg-type]
    sharded = apply_plan(model, "llama", build_mesh("dp=1,tp=2"), mixed_precision=BF16)
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tables = kwargs["position_embeddings"]
        seen.update(table.dtype for table in tables)
        return args, {**kwargs, "position_embeddings": tuple(table.to(torch.bfloat16) for table in tables)}

    for layer in sharded.model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(look, with_kwargs=True)  # type: ignore[union-attr]
    sharded(input_ids=IDS)
    return seen


def offloaded(mesh: str) -> tuple[set[str], list[str]]:
    reference = tiny_models.build("llama")
    device_mesh = build_mesh(mesh)
    sharded = apply_plan(tiny_models.build("llama"), "llama", device_mesh, sequence_parallel=True, cpu_offload=True)
    faults = list(parity.compare_batch(parity.Reference(reference), sharded, device_mesh, parity.Batch(), seed=0))
    return {p.device.type for p in sharded.parameters()}, faults


COUNTED = {
    "0": "model.layers.0",
    "self_attn": "model.layers.0.self_attn",
    "mlp": "model.layers.0.mlp",
    "up_proj": "model.layers.0.mlp.up_proj",
}


def recomputed(case: parity.Case, modules: dict[str, str] = COUNTED) -> tuple[dict[str, int], list[str]]:
    """How often each of some modules runs forward in one step, and what the parity contract says."""
    mesh = build_mesh(case.mesh)
    model = tiny_models.build(case.model)
    runs: Counter[str] = Counter()
    for name, fqn in modules.items():
        _count_forwards(model.get_submodule(fqn), name, runs)
    sharded = case.apply(model, mesh)
    faults = list(parity.compare_batch(parity.kept(case.model, {}), sharded, mesh, parity.Batch(), seed=0))
    return dict(runs), faults


def _count_forwards(module: Any, name: str, runs: Counter[str]) -> None:
    forward = type(module).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs[name] += 1
        return forward(self, *args, **kwargs)

    module.__class__ = type(type(module).__name__, (type(module),), {"forward": counted})


# ---------------------------------------------------------------- styles and plans from Python


class Doubling(ParallelStyle):
    """A style of a user's own, which knows nothing of plans: it doubles a module's output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, args, output: output * 2)
        return module


def native_style() -> float:
    """The ratio that a native style puts between a norm's outputs with and without it."""
    mesh = build_mesh("tp=2")
    outputs = []
    for overrides in (None, {"model.rotary_emb": Doubling()}):
        model = apply_plan(tiny_models.build("llama"), "llama", mesh, overrides=overrides)
        tables = model.model.rotary_emb(torch.zeros(1, 4, 64), torch.arange(4)[None])  # type: ignore[operator,union-attr]
        outputs.append(tables)  # twice a pair is four tables
    return len(outputs[1]) / len(outputs[0])


def registered_row(gradient: Gradient) -> list[str]:
    """A user's own row for Qwen3's head norms: right with a partial gradient, and refused by numbers without."""
    case = parity.Case(
        "qwen3",
        "tp=2",
        False,
        options={
            "overrides": {".layers.*.self_attn.{q,k}_norm": "per_head"},
            "styles": {"per_head": Style("per_head", "each rank norms its own heads", gradient=gradient)},
        },
    )
    return parity.compare(case, [parity.Batch()])


def nemo_rl_plan(sequence_parallel: bool) -> dict[str, Any]:
    """The shape of NeMo-RL's plans for Llama: keys of the whole model, torch's styles."""
    stream = Shard(1) if sequence_parallel else Replicate()
    layers = "model.layers.*"
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        f"{layers}.self_attn.q_proj": ColwiseParallel(),
        f"{layers}.self_attn.k_proj": ColwiseParallel(),
        f"{layers}.self_attn.v_proj": ColwiseParallel(),
        f"{layers}.self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        f"{layers}.mlp.up_proj": ColwiseParallel(),
        f"{layers}.mlp.gate_proj": ColwiseParallel(),
        f"{layers}.mlp.down_proj": RowwiseParallel(output_layouts=stream),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        plan |= {
            "model.rotary_emb": "rotary",
            f"{layers}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": stream},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            f"{layers}.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
            f"{layers}.input_layernorm": SequenceParallel(),
            f"{layers}.post_attention_layernorm": SequenceParallel(),
            "model.norm": SequenceParallel(),
        }
    return plan


def stable_plan() -> dict[str, Any]:
    """NeMo-RL's other plan: no sum over ranks, o_proj and down_proj column-wise on gathered inputs."""
    gathering = ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    layers = "model.layers.*"
    return nemo_rl_plan(False) | {f"{layers}.self_attn.o_proj": gathering, f"{layers}.mlp.down_proj": gathering}


PYTHON_PLANS: dict[str, Any] = {
    "nine keys": lambda: nemo_rl_plan(False),
    "sequence parallel": lambda: nemo_rl_plan(True),
    "stable": stable_plan,
    "strings": lambda: {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.{gate,up}_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_rep",
    },
}


def python_plan(name: str, mesh: str) -> list[str]:
    case = parity.Case("llama", mesh, sequence_parallel=None, plan=PYTHON_PLANS[name]())  # type: ignore[arg-type]
    return parity.compare(case, [parity.Batch(), parity.Batch(length=5), parity.Batch(mask=True)])


# ---------------------------------------------------------------- models wrapped before


def wrapped(how: str, mesh: str, sequence_parallel: bool) -> list[str]:
    reference = tiny_models.build("llama")
    model = tiny_models.build("llama")
    layers = model.model.layers  # type: ignore[union-attr]
    for number in range(len(layers)):  # type: ignore[arg-type]
        if how == "compile":
            layers[number] = torch.compile(layers[number], backend="eager")  # type: ignore[index,operator]
        elif how == "compile in place":
            layers[number].compile(backend="eager")  # type: ignore[index,operator,union-attr]
        elif how == "checkpoint":
            layers[number] = checkpoint_wrapper(layers[number])  # type: ignore[index,operator]
    device_mesh = build_mesh(mesh)
    sharded = apply_plan(model, "llama", device_mesh, sequence_parallel=sequence_parallel)
    faults = []
    for number, length in enumerate((16, 5)):
        inputs, targets = parity.make_inputs(parity.Batch(length=length), seed=number)
        expected = parity.step(reference, inputs, targets)
        own = {name: parity.rows_of(value, device_mesh) for name, value in inputs.items()}
        actual = parity.step(sharded, own, parity.rows_of(targets, device_mesh))
        faults += parity.same_logits(parity.rows_of(expected.logits, device_mesh), parity.whole(actual.logits))
    gradients = {_plain(name): p.grad for name, p in sharded.named_parameters()}
    for name, parameter in reference.named_parameters():
        gradient = gradients[name]
        assert gradient is not None
        assert parameter.grad is not None
        if not (parity.whole(gradient) - parameter.grad).norm() <= 1e-4 * parameter.grad.norm():
            faults.append(f"gradient of {name} differs")
    if not all(isinstance(p, DTensor) for p in sharded.parameters()):
        faults.append("a parameter is not a DTensor")
    return faults


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def recomputed_with_cache() -> tuple[list[str], int]:
    """A training loop that leaves `use_cache` at its default; how long the cache is after the backward."""
    reference = tiny_models.build("llama")
    sharded = apply_plan(
        tiny_models.build("llama"), "llama", build_mesh("tp=2"), recompute=[".layers.*"], sequence_parallel=True
    )
    for model in (reference, sharded):
        output = model(input_ids=IDS)
        parity.cross_entropy(output.logits, IDS).backward()
    return list(parity.same_gradients(reference, sharded)), output.cache.get_seq_length()
