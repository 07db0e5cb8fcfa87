"""Cross entropy on logits that stay sharded over the vocabulary.

With x the fp32 logits of one token, t its label, V the vocabulary and s the label smoothing, the loss is
logsumexp(x) - (1 - s) x_t - (s / V) sum(x). Two small all-reduces per call, the maximum and then the sums, as in
Megatron-LM (Shoeybi et al. 2019).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard

from shardplan import _compat
from shardplan.parallel.collectives import Ranks

Reduction = Literal["mean", "sum", "none"]

# Rows whose logits are in fp32 at a time: at 128k entries over tp 8 that is 32 MiB.
CHUNK_ROWS = 512


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """The cross entropy of ``logits`` against ``labels``, in fp32; like `torch.nn.functional.cross_entropy`.

    Args:
        logits: (..., V), a plain tensor or a DTensor sharded on its last dim over one mesh axis, never gathered. Over
            other axes its rows may be sharded: the result is then of this rank's rows.
        labels: (...) integers of this rank's rows, the same on every rank that shares them; not shifted here.
        ignore_index: the label of positions that do not count.
        label_smoothing: between 0 and 1.
        reduction: ``mean`` over the positions that count, ``sum``, or ``none``.

    Returns:
        A scalar, or (...) for ``none``; the same on every rank that shares the logits.

    Raises:
        ValueError: shapes or placements that do not fit, or an unknown reduction.
        IndexError: a label outside the vocabulary (on CPU; on CUDA a device-side assertion).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction '{reduction}' is none of mean, sum, none")
    losses = _token_losses(logits, labels, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (labels != ignore_index).sum() if reduction == "mean" else total


def log_probs(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The log-probability of each label, in fp32; zero where ``labels`` is ``ignore_index``.

    Args:
        logits: (..., V) as for `cross_entropy`.
        labels: (...) integers; not shifted here.

    Returns:
        (...), the same on every rank that shares the logits.

    Raises:
        ValueError: shapes that do not fit.
    """
    return -_token_losses(logits, labels, ignore_index, label_smoothing=0.0)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,  # noqa: ARG001 - the signature is transformers'
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,  # noqa: ARG001
) -> Tensor:
    """What transformers computes for ``labels=``, on sharded logits: its ``ForCausalLMLoss``, argument for argument.

    Args:
        logits: (batch, sequence, V).
        labels: (batch, sequence); position i is predicted from i - 1.
        vocab_size: V, unused: the logits know it.
        num_items_in_batch: divides the sum, instead of the number of labels here.
        shift_labels: labels already shifted.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    if num_items_in_batch is None:
        return cross_entropy(logits, shift_labels, ignore_index=ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


def _token_losses(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    vocabulary = logits.shape[-1]
    local, first, ranks = _local_part(logits)
    labels = labels.to_local() if isinstance(labels, DTensor) else labels
    if local.shape[:-1] != labels.shape:
        expected, given = tuple(local.shape[:-1]), tuple(labels.shape)
        raise ValueError(f"logits of shape {tuple(logits.shape)} need labels of shape {expected}, not {given}")
    _require_labels_in(vocabulary, labels, ignore_index)
    rows = local.reshape(-1, local.shape[-1])
    targets = labels.reshape(-1)
    losses: Tensor = _TokenLoss.apply(rows, targets, first, vocabulary, ignore_index, label_smoothing, ranks)
    return losses.view(labels.shape)


def _require_labels_in(vocabulary: int, labels: Tensor, ignore_index: int) -> None:
    """No rank has the column of a label outside the vocabulary; without this its loss would be a quiet logsumexp."""
    fits = (((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)).all()
    message = f"a label is neither in [0, {vocabulary}) nor ignore_index={ignore_index}"
    if labels.device.type == "cpu":
        if _compat.has_values(labels) and not fits:
            raise IndexError(message)
    else:
        torch._assert_async(fits, message)  # no wait for the device


def _local_part(logits: Tensor) -> tuple[Tensor, int, Ranks | None]:
    """This rank's rows and columns, the vocabulary entry of the first column, and who holds the others."""
    if not isinstance(logits, DTensor):
        return logits, 0, None
    mesh, vocabulary = logits.device_mesh, Shard(logits.ndim - 1)
    axes = [axis for axis, placement in enumerate(logits.placements) if placement == vocabulary]
    others = [placement for placement in logits.placements if placement != vocabulary]
    if len(axes) > 1 or any(placement.is_partial() for placement in others):
        raise ValueError(f"logits placed {logits.placements} must be cut over the vocabulary by one mesh axis at most")
    if not axes:
        return logits.to_local(), 0, None
    ranks = Ranks(mesh.get_group(axes[0]).group_name, mesh.get_local_rank(axes[0]), mesh.size(axes[0]))
    return logits.to_local(), ranks.rank * -(-logits.shape[-1] // ranks.size), ranks


class _TokenLoss(Function):
    """(rows, V / tp) logits, (rows,) labels -> (rows,) losses, the same on every rank.

    The logits are read chunk by chunk, so that their fp32 copy never exists whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        labels: Tensor,
        first: int,
        vocabulary: int,
        ignore_index: int,
        smoothing: float,
        ranks: Ranks | None,
    ) -> Tensor:
        columns = labels - first
        here = (columns >= 0) & (columns < x.shape[1]) & (labels != ignore_index)
        columns = columns.masked_fill(~here, 0)
        maximum = _over_ranks(x.amax(-1).float(), "max", ranks)
        sums = x.new_zeros((3, x.shape[0]), dtype=torch.float32)  # of exp(x - maximum), of the label's x, of all x
        for rows in _chunks(x.shape[0]):
            shifted = x[rows].float() - maximum[rows, None]
            sums[1, rows] = shifted.gather(1, columns[rows, None]).squeeze(1).masked_fill(~here[rows], 0)
            if smoothing:
                sums[2, rows] = shifted.sum(-1)
            sums[0, rows] = shifted.exp_().sum(-1)
        exponentials, label, everything = _over_ranks(sums, "sum", ranks)
        losses = exponentials.log() - (1 - smoothing) * label - (smoothing / vocabulary) * everything
        counts = labels != ignore_index
        ctx.save_for_backward(x, columns, here, counts, maximum + exponentials.log())
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        counted: Tensor = losses.masked_fill(~counts, 0)
        return counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, columns, here, counts, logsumexp = ctx.saved_tensors
        grad = grad.masked_fill(~counts, 0)
        gradient = torch.empty_like(x)
        for rows in _chunks(x.shape[0]):
            chunk = (x[rows].float() - logsumexp[rows, None]).exp_()
            if ctx.smoothing:
                chunk -= ctx.smoothing / ctx.vocabulary
            target = here[rows, None].to(chunk.dtype) * (ctx.smoothing - 1)
            chunk.scatter_add_(1, columns[rows, None], target)
            gradient[rows] = (chunk * grad[rows, None]).to(x.dtype)
        return gradient, None, None, None, None, None, None


def _chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS)]


def _over_ranks(x: Tensor, op: str, ranks: Ranks | None) -> Tensor:
    return x if ranks is None else _compat.all_reduce(x, ranks.group, op)
