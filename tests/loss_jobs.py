"""What tests/test_loss.py runs on the pool: the vocabulary-parallel loss against torch's on whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import tolerances
from counting import counted
from shardplan import cross_entropy, log_probs

IGNORED = -100


def example(vocabulary: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 7)) -> tuple[Tensor, Tensor]:
    """Logits with a spread that overflows exp in fp32, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(*shape, vocabulary, generator=generator) * 30).to(dtype)
    labels = torch.randint(0, vocabulary, shape, generator=generator)
    labels.view(-1)[::4] = IGNORED
    labels.view(-1)[1] = 0
    labels.view(-1)[2] = vocabulary - 1
    return logits, labels


def sharded(logits: Tensor, tp: int) -> DTensor:
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    return distribute_tensor(logits, mesh, [Shard(-1)]).detach().requires_grad_()


def compare_cross_entropy(tp: int, vocabulary: int, dtype: torch.dtype, options: dict[str, Any]) -> list[str]:
    logits, labels = example(vocabulary, dtype)
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, **options)
    own = sharded(logits, tp)
    actual = cross_entropy(own, labels, **options)
    weights = torch.arange(1.0, labels.numel() + 1)  # unequal gradients of the losses of `none`
    (expected * weights if expected.ndim else expected).sum().backward()
    (actual.flatten() * weights if actual.ndim else actual).sum().backward()
    assert whole.grad is not None
    return [*_differs("loss", actual.flatten(), expected.flatten()), *_gradient_differs(own, whole.grad, dtype)]


def compare_log_probs(tp: int, vocabulary: int, dtype: torch.dtype) -> list[str]:
    logits, labels = example(vocabulary, dtype)
    whole = logits.float().requires_grad_()
    picked = F.log_softmax(whole, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = picked.masked_fill(labels == IGNORED, 0)
    own = sharded(logits, tp)
    actual = log_probs(own, labels)
    for values in (expected, actual):
        (values * torch.arange(21.0).view(3, 7)).sum().backward()
    assert whole.grad is not None
    return [*_differs("log_probs", actual, expected), *_gradient_differs(own, whole.grad, dtype)]


def _differs(what: str, actual: Tensor, expected: Tensor) -> list[str]:
    off = ((actual - expected).abs() / expected.abs().clamp(min=1)).max().item()
    return [] if off <= tolerances.LOSS and actual.dtype == torch.float32 else [f"{what} is off by {off:.1e}"]


def _gradient_differs(own: DTensor, expected: Tensor, dtype: torch.dtype) -> list[str]:
    assert own.grad is not None
    assert isinstance(own.grad, DTensor)
    gradient = own.grad.full_tensor()
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    off = ((gradient.float() - expected).norm() / expected.norm()).item()
    faults = [] if off <= tolerances.LOSS_GRADIENT + rounding else [f"the gradient is off by {off:.1e}"]
    return faults if gradient.dtype == dtype else [*faults, f"the gradient is {gradient.dtype}"]


def against_loss_parallel(tp: int) -> list[str]:
    """torch's own, where it works: mean, no smoothing, a 1-D mesh."""
    logits, labels = example(64, torch.float32)
    theirs, ours = sharded(logits.flatten(0, 1), tp), sharded(logits.flatten(0, 1), tp)
    with loss_parallel():
        expected = F.cross_entropy(theirs, labels.flatten(), ignore_index=IGNORED)
        expected.backward()
    actual = cross_entropy(ours, labels.flatten())
    actual.backward()
    assert isinstance(theirs.grad, DTensor)
    value = expected.full_tensor() if isinstance(expected, DTensor) else expected
    return [
        *_differs("loss", actual.detach().view(1), value.detach().view(1)),
        *_gradient_differs(ours, theirs.grad.full_tensor(), torch.float32),
    ]


def collectives(tp: int) -> tuple[int, int]:
    """How many collectives the loss sends, forward and backward."""
    logits, labels = example(64, torch.float32)
    own = sharded(logits, tp)
    loss, forward = counted(cross_entropy, own, labels)
    _, backward = counted(loss.backward)
    return sum(forward.ours.values()) + sum(forward.plain.values()), sum(backward.ours.values())


def unfit_labels() -> list[str]:
    messages = []
    logits, labels = example(33, torch.float32)
    for broken in (labels[:, :-1], labels.masked_fill(labels == 0, 33), labels.masked_fill(labels == 0, -1)):
        try:
            cross_entropy(sharded(logits, 2), broken)
        except (ValueError, IndexError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def on_two_axes() -> list[str]:
    """Logits that lie on a (dp, tp) mesh, rows over dp: the loss of this rank's rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    logits, labels = example(33, torch.float32, (4, 6))
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum").backward()
    own = distribute_tensor(logits, mesh, [Shard(0), Shard(2)]).detach().requires_grad_()
    placed = distribute_tensor(labels, mesh["dp"], [Shard(0)])
    cross_entropy(own, placed.to_local(), reduction="sum").backward()
    assert whole.grad is not None
    return _gradient_differs(own, whole.grad, torch.float32)
