"""What ranks do in tests of adapters: a model with low-rank adapters, sharded and not, gradient by gradient."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import parity
import tiny_models
import tolerances
from parity import Batch
from pool import build_mesh
from shardplan import apply_plan
from shardplan.inventory import take_inventory
from shardplan.weights import stored_parameters


def adapted(name: str, targets: list[str]) -> nn.Module:
    """With adapters of rank 4, none of them zero."""
    model: nn.Module = get_peft_model(tiny_models.build(name), LoraConfig(r=4, target_modules=targets))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def compared(name: str, targets: list[str], mesh_text: str, sequence_parallel: bool) -> list[str]:
    """Violations; the base has no gradients, and every adapter has the reference's."""
    mesh = build_mesh(mesh_text)
    reference = adapted(name, targets)
    sharded = apply_plan(adapted(name, targets), tiny_models.plan_of(name), mesh, sequence_parallel=sequence_parallel)
    own_names = {p.fqn: p.identity for p in take_inventory(reference).parameters}
    by_identity = {id(parameter): parameter for parameter in reference.parameters()}
    faults: list[str] = []
    for number, batch in enumerate((Batch(mask=True), Batch(length=7), Batch(length=1))):
        inputs, targets_of_batch = parity.make_inputs(batch, number)
        own: dict[str, Any] = {key: parity.rows_of(value, mesh) for key, value in inputs.items()}
        expected = parity.step(reference, inputs, targets_of_batch)
        actual = parity.step(sharded, own, parity.rows_of(targets_of_batch, mesh))
        difference = (parity.whole(actual.logits) - parity.rows_of(expected.logits, mesh)).abs().max().item()
        if not difference <= tolerances.LOGITS:
            faults.append(f"{batch}: logits differ by {difference:.1e}")
    faults += parity.different_replicas({n: p.grad for n, p in sharded.named_parameters() if p.grad is not None})
    for fqn, stored in stored_parameters(sharded).items():
        wanted, given = by_identity[own_names[fqn]].grad, stored.gradient()
        if (wanted is None) != (given is None) or (wanted is None) == ("lora_" in fqn):
            faults.append(f"{fqn} has {'no' if given is None else 'a'} gradient")
        elif wanted is not None and given is not None:
            off = (given.whole() - wanted).norm().item() / wanted.norm().item()
            faults += [f"gradient of {fqn} is off by {off:.1e}"] if not off <= tolerances.GRADIENT else []
    return faults
