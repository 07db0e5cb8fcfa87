"""`cross_entropy` and `log_probs` on logits that stay sharded over the vocabulary."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import loss_jobs
from pairs import pairwise
from pool import Pool
from shardplan import cross_entropy, loss

OPTIONS = [
    *({"reduction": reduction} for reduction in ("mean", "sum", "none")),
    *({"reduction": reduction, "label_smoothing": 0.1} for reduction in ("mean", "sum", "none")),
]
CASES = list(pairwise(tp=[1, 2, 4], vocabulary=[33, 64, 99], dtype=[torch.float32, torch.bfloat16], options=OPTIONS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cross_entropy(pool: Pool, case: dict[str, Any]) -> None:
    tp = case["tp"]
    assert pool.run(tp, loss_jobs.compare_cross_entropy, *case.values()) == [[]] * tp


@pytest.mark.parametrize(("tp", "vocabulary"), list(product([1, 2, 4], [33, 64])))
def test_log_probs(pool: Pool, tp: int, vocabulary: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert pool.run(tp, loss_jobs.compare_log_probs, tp, vocabulary, dtype) == [[]] * tp


@pytest.mark.parametrize("tp", [2, 4])
def test_agrees_with_loss_parallel(pool: Pool, tp: int) -> None:
    assert pool.run(tp, loss_jobs.against_loss_parallel, tp) == [[]] * tp


def test_sends_the_maximum_and_the_sums(pool: Pool) -> None:
    assert pool.run(2, loss_jobs.collectives, 2) == [(2, 0)] * 2


def test_labels_that_do_not_fit(pool: Pool) -> None:
    for messages in pool.run(2, loss_jobs.unfit_labels):
        assert messages == [
            "ValueError: logits of shape (3, 7, 33) need labels of shape (3, 7), not (3, 6)",
            "IndexError: a label is neither in [0, 33) nor ignore_index=-100",
            "IndexError: a label is neither in [0, 33) nor ignore_index=-100",
        ]


def test_logits_on_two_mesh_axes(pool: Pool) -> None:
    assert pool.run(4, loss_jobs.on_two_axes) == [[]] * 4


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole logits on one process, in chunks of four rows."""
    logits, labels = loss_jobs.example(33, torch.float32)
    gradients = []
    for rows in (loss.CHUNK_ROWS, 4):
        monkeypatch.setattr(loss, "CHUNK_ROWS", rows)
        own = logits.clone().requires_grad_()
        cross_entropy(own, labels, label_smoothing=0.1).backward()
        gradients.append(own.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_nothing_counts() -> None:
    """Only ignored labels: the mean is nan, as torch's is, and the sum is zero."""
    logits = torch.zeros(2, 5, requires_grad=True)
    labels = torch.full((2,), -100)
    assert cross_entropy(logits, labels).isnan() == F.cross_entropy(logits, labels).isnan()
    assert cross_entropy(logits, labels, reduction="sum") == 0


def test_an_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="reduction 'average' is none of mean, sum, none"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), reduction="average")  # type: ignore[arg-type]
