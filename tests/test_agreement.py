"""Checksums: what they tell apart. That ranks act on them is in test_apply.py."""

import pytest
import torch

from shardplan import agreement
from shardplan.agreement import checksum

STRUCTURED = torch.arange(32.0).view(2, 16)


@pytest.mark.parametrize(
    "other",
    [
        STRUCTURED.flip(0),
        STRUCTURED.flip(1),
        STRUCTURED.view(16, 2),
        STRUCTURED.double(),
        STRUCTURED.roll(1),
        STRUCTURED + torch.eye(2, 16) * 1e-6,
        -STRUCTURED,
    ],
    ids=["rows", "columns", "shape", "dtype", "rolled", "a bit", "sign"],
)
def test_what_differs_has_another_checksum(other: torch.Tensor) -> None:
    assert checksum(other) != checksum(STRUCTURED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_copy_has_the_same(dtype: torch.dtype) -> None:
    tensor = STRUCTURED.to(dtype)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert 0 <= checksum(tensor) < 2**63


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checksum(STRUCTURED)
    monkeypatch.setattr(agreement, "CHUNK", 5)
    assert checksum(STRUCTURED) == whole
    assert checksum(torch.zeros(0, 3)) != whole
