"""What tests/test_overlap.py runs on the pool: in which order a backward works, and backwards of unusual kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import parity
import tiny_models
import tolerances
from parity import Batch, Case
from pool import build_mesh

STARTED = {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"}


class Ordered(TorchDispatchMode):
    """How many products run between the start of each collective of a backward and the wait for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.between: list[int] = []
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.name().partition("::")[2].partition(".")[0]
        if name in STARTED:
            self.products = 0
        self.products += name == "mm"
        if name == "wait_tensor":
            self.between.append(self.products)
        return func(*args, **(kwargs or {}))


def products_meanwhile(case: Case) -> list[int]:
    """Of a backward, collective by collective."""
    mesh = build_mesh(case.mesh)
    model = case.apply(tiny_models.build(case.model), mesh)
    inputs, _ = parity.make_inputs(Batch())
    logits = model(**inputs, use_cache=False).logits
    own = logits.to_local()
    with Ordered() as ordered:
        own.backward(torch.ones_like(own))
    return ordered.between


# ---------------------------------------------------------------- backwards of every kind

Backward = Callable[[nn.Module, Callable[[], Tensor]], list[Tensor | None]]


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _linears(model: nn.Module) -> list[nn.Module]:
    """Those of the layers, in the order in which a forward calls the first ones."""
    return [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name]


def _grads(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in _parameters(model)]


def once(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    loss().backward()
    return _grads(model)


def asked_for(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """By `torch.autograd.grad`, which accumulates nothing."""
    return list(torch.autograd.grad(loss(), _parameters(model), allow_unused=True))


def after_a_part(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """Once for one activation alone, inside a block, and then for all of the same graph."""
    seen: list[Tensor] = []
    inside = _linears(model)[0]
    handle = inside.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    value = loss()
    handle.remove()
    torch.autograd.grad(value, seen[:1], retain_graph=True)
    value.backward()
    return _grads(model)


def of_one_linear(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """After a backward that went through all of a block and asked for something inside, one through v alone."""
    seen: list[Tensor] = []
    q, _, v, *_ = _linears(model)
    handles = [
        q.register_forward_pre_hook(lambda _, args: seen.append(args[0])),
        v.register_forward_hook(lambda _, args, output: seen.append(output)),
    ]
    value = loss()
    for handle in handles:
        handle.remove()
    torch.autograd.grad(value, seen[:1], retain_graph=True)
    seen[1].square().sum().backward()
    return _grads(model)


def twice(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """Of one graph: twice the gradient."""
    value = loss() / 2
    value.backward(retain_graph=True)
    value.backward()
    return _grads(model)


def after_a_failure(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """A forward that raises inside a block, between the reading of weights and their use."""
    inside = _linears(model)
    handle = inside[1].register_forward_pre_hook(_raises)
    with suppress(InterruptedError):
        loss()
    handle.remove()
    assert not any(getattr(module, "tp_ahead", None) for module in inside), "a weight that was read is still there"
    return once(model, loss)


def _raises(*_: Any) -> None:
    raise InterruptedError


def recomputed(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return once(model, loss)


def recomputed_reentrant(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """A backward within a backward."""
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    return once(model, loss)


def frozen_weights(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """All but one of the first block's linears, and the embedding, whose output has no gradient then."""
    for name, parameter in model.named_parameters():
        if "embed" in name or ("layers.0.self_attn" in name and "q_proj" not in name):
            parameter.requires_grad_(False)
    return once(model, loss)


def with_hooks(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """Full backward hooks of the linears, which put a node of their own before and behind each."""
    seen: list[nn.Module] = []
    for module in _linears(model):
        module.register_full_backward_hook(lambda linear, inputs, outputs: seen.append(linear))
    gradients = once(model, loss)
    assert len(seen) == len(_linears(model))
    return gradients


BACKWARDS: dict[str, Backward] = {
    backward.__name__: backward
    for backward in (
        once,
        asked_for,
        after_a_part,
        of_one_linear,
        twice,
        after_a_failure,
        recomputed,
        recomputed_reentrant,
        frozen_weights,
        with_hooks,
    )
}


def different(case: Case, kind: str) -> list[str]:
    """Gradients that are not those of the same backward of the unsharded model."""
    mesh, (inputs, targets) = build_mesh(case.mesh), parity.make_inputs(Batch())
    reference = tiny_models.build(case.model)
    sharded = case.apply(tiny_models.build(case.model), mesh)
    expected, actual = (BACKWARDS[kind](m, partial(_loss, m, inputs, targets)) for m in (reference, sharded))
    names = [name for name, parameter in reference.named_parameters() if parameter.requires_grad]
    return list(_different(names, expected, actual))


def _loss(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return parity.cross_entropy(model(**inputs, use_cache=False).logits, targets)


def _different(
    names: list[str],
    expected: list[Tensor | None],
    actual: list[Tensor | None],
    tolerance: float = tolerances.GRADIENT,
) -> Iterator[str]:
    for name, wanted, given in zip(names, expected, actual, strict=True):
        if wanted is None or given is None:
            if wanted is not given:
                yield f"{name}: {wanted} and {given}"
            continue
        off = (parity.whole(given) - wanted).norm() / wanted.norm()
        if not off <= tolerance:
            yield f"{name} is off by {off:.1e}"


def differentiated_again(case: Case) -> str:
    """What is said to who asks for a graph of the gradients."""
    model = case.apply(tiny_models.build(case.model), build_mesh(case.mesh))
    inputs, _ = parity.make_inputs(Batch())
    logits = model(**inputs, use_cache=False).logits.to_local()
    try:
        logits.square().sum().backward(create_graph=True)
    except NotImplementedError as error:
        return str(error)
    return ""


def under_autocast(case: Case) -> list[str]:
    """Of a forward in bfloat16, whose operators autocast casts the operands of."""
    mesh, (inputs, targets) = build_mesh(case.mesh), parity.make_inputs(Batch())
    found = []
    for model in (tiny_models.build(case.model), case.apply(tiny_models.build(case.model), mesh)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model, inputs, targets)
        loss.backward()
        found.append(_grads(model))
    names = [name for name, _ in model.named_parameters()]
    return list(_different(names, *found, tolerances.BF16))
