"""The parity contract, pairwise: every pair of settings occurs, several batches share one applied model.

`python tests/full_parity.py` runs every combination.
"""

from typing import Any

import pytest

import parity
from pairs import pairwise
from parity import Batch, Case
from pool import Pool
from tiny_models import MODELS

LAYERS = ".layers.*"

# What one applied model is called with: every pair of settings occurs in some batch; a case takes
# a quarter of them. The lengths 5 and 1 run uncut.
BATCHES = [
    Batch(**settings)
    for settings in pairwise(
        length=[16, 5, 1],
        attention=["sdpa", "eager"],
        mask=[False, True],
        positions=["absent", "given", "restarting"],
        labels=[False, True],
        allowed=lambda length=16, labels=False, **_: not (labels and length == 1),  # nothing to predict
    )
]

MESHES = ["tp=2", "dp=1,tp=2", "dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=1", "dp_replicate=2,dp=1,tp=2"]
TRAINED = ("tp=2", "dp=2,tp=2")
RECOMPUTATION: dict[str, dict[str, Any]] = {
    "none": {},
    "layers": {"options": {"recompute": [LAYERS]}},
    "mlp": {"options": {"recompute": [f"{LAYERS}.mlp"]}},
    "transformers": {"checkpointing": True},
}


def case(model: str, mesh: str, sequence_parallel: bool, recomputation: str) -> Case:
    return Case(model, mesh, sequence_parallel, training=mesh in TRAINED, **RECOMPUTATION[recomputation])


CASES = [
    (case(**settings), BATCHES[number % 4 :: 4])
    for number, settings in enumerate(
        pairwise(model=list(MODELS), mesh=MESHES, sequence_parallel=[False, True], recomputation=list(RECOMPUTATION))
    )
]


@pytest.mark.parametrize(("case", "batches"), CASES, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_parity(pool: Pool, case: Case, batches: list[Batch]) -> None:
    faults = pool.run(case.world_size, parity.compare, case, batches)
    assert faults == [[]] * case.world_size


@pytest.mark.parametrize(("mesh", "sequence_parallel"), [("tp=2", False), ("tp=2", True), ("dp=2,tp=2", True)])
def test_parity_with_images(pool: Pool, mesh: str, sequence_parallel: bool) -> None:
    """The vision tower ends in torch's MultiheadAttention, which reads the weights of a module it never calls."""
    case = Case("gemma3-vision", mesh, sequence_parallel)
    batches = [Batch(length=16, image=True), Batch(length=9, image=True)]
    assert pool.run(case.world_size, parity.compare, case, batches) == [[]] * case.world_size


def test_every_model_meets_every_mesh_and_every_batch() -> None:
    assert {(case.model, case.mesh) for case, _ in CASES} == {(model, mesh) for model in MODELS for mesh in MESHES}
    assert {(case.mesh, case.sequence_parallel) for case, _ in CASES} >= {
        (m, sp) for m in MESHES for sp in (False, True)
    }
    assert {batch for _, batches in CASES for batch in batches} == set(BATCHES)
