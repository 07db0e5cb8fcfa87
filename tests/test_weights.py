"""Weights and optimizer state know nothing of the tp degree, and come out as the unsharded model has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny_models
import weight_jobs
from pool import Pool
from shardplan import hf_state_dict
from shardplan.mesh import parse_mesh

PACKED = ("nemotron-h", "phi3", "gpt2")
MESHES = ("tp=4", "dp=2,tp=2", "dp=2", "tp=1", "dp=1", "dp=4,tp=1")


@pytest.mark.parametrize("name", PACKED)
def test_a_checkpoint_is_bit_equal_on_every_mesh(pool: Pool, name: str, tmp_path: Path) -> None:
    weights, state = pool.run(2, weight_jobs.written, name, "tp=2", str(tmp_path), shared=True)[0]
    assert len(state) >= 3 * len(weights) / 2
    for mesh in MESHES:
        for read_weights, read_state in pool.run(parse_mesh(mesh).size, weight_jobs.read, name, mesh, str(tmp_path)):
            assert different(weights, read_weights) == []
            assert different(state, read_state) == []


@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2", "dp=2", "tp=1"])
@pytest.mark.parametrize("name", [*PACKED, "llama-tied", "llama-odd", "gemma3-vision", "nemotron-h-backbone"])
def test_tensors_come_out_as_the_unsharded_model_has_them(pool: Pool, name: str, mesh: str) -> None:
    expected = tiny_models.build(name).state_dict()
    for tensors in pool.run(parse_mesh(mesh).size, weight_jobs.out, name, mesh, shared=True):
        assert [key for key, _ in tensors] == list(expected)
        assert different(expected, dict(tensors)) == []


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "mesh"), [("nemotron-h", "tp=4"), ("gpt2", "dp=2,tp=2"), ("llama-odd", "dp=2,tp=2")])
def test_tensors_go_in_as_the_unsharded_model_has_them(pool: Pool, name: str, mesh: str, streaming: bool) -> None:
    expected = tiny_models.build(name).state_dict()
    for tensors in pool.run(4, weight_jobs.out_and_in, name, mesh, streaming, shared=True):
        assert different(expected, dict(tensors)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "missing: model.embed_tokens.weight"),
        ("unknown", "not in the model: nobody.weight"),
        ("misshapen", "of another shape: model.embed_tokens.weight is (255, 64), not (256, 64)"),
    ],
)
def test_other_tensors_are_refused_and_nothing_is_copied(pool: Pool, change: str, said: str) -> None:
    for message, unchanged in pool.run(2, weight_jobs.refused, "phi3", "tp=2", change):
        assert message == f"these tensors are not the model's: {said}"
        assert unchanged


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="no plan was applied to this model: call apply_plan first"):
        next(hf_state_dict(tiny_models.build("llama")))


def different(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose tensors are not bit-equal."""
    names = sorted({*expected, *actual})
    return [n for n in names if n not in expected or n not in actual or not torch.equal(expected[n], actual[n])]
