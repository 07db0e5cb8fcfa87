"""Differences that pass as rounding: those that the unsharded model has from itself, and no larger ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardplan.verify.rounding import ROUNDINGS, Rounding

X = torch.linspace(-1.0, 1.0, 64).view(8, 8)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def outputs(model: nn.Module) -> dict[str, Tensor]:
    (parameter, *_) = model.parameters()
    return {"y": model(X.to(parameter.dtype)).detach()}


def error() -> Tensor:
    return outputs(build().double())["y"] - outputs(build())["y"]


def test_as_much_as_the_model_is_off_from_itself_is_rounding() -> None:
    rounding = Rounding(build, outputs)
    largest, norm = error().abs().max().item(), error().norm().item()
    assert 0 < largest < norm < 1e-5
    assert rounding.explains_largest("y", ROUNDINGS * largest)
    assert rounding.explains_norm("y", ROUNDINGS * norm)


def test_more_is_not() -> None:
    rounding = Rounding(build, outputs)
    assert not rounding.explains_largest("y", 1.01 * ROUNDINGS * error().abs().max().item())
    assert not rounding.explains_norm("y", 1.01 * ROUNDINGS * error().norm().item())
    assert not rounding.explains_norm("y", float("nan"))
    assert not rounding.explains_norm("another", 0.0)


def test_a_model_that_does_not_run_in_double_precision_has_none() -> None:
    rounding = Rounding(build, lambda model: {"y": model(X).detach()})
    assert not rounding.explains_norm("y", 0.0)
