"""The parity contract, pairwise: every pair of settings occurs, several batches share one applied model."""

import pytest

import parity
from pairs import pairwise
from parity import Batch, Case
from pool import Pool

# What one applied model is called with: every pair of settings occurs in some batch. The lengths 5 and 1 run uncut.
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

CASES = [
    Case(**settings)
    for settings in pairwise(
        model=["llama", "llama-tied", "llama-biased", "mistral"],
        mesh=["tp=2", "dp=1,tp=2", "dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=1"],
        sequence_parallel=[False, True],
        checkpointing=[False, True],
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(pool: Pool, case: Case) -> None:
    faults = pool.run(case.world_size, parity.compare, case, BATCHES)
    assert faults == [[]] * case.world_size


def test_every_mesh_runs_in_both_modes() -> None:
    assert {(case.mesh, case.sequence_parallel) for case in CASES} >= {
        (mesh, mode) for mesh in ("tp=2", "dp=1,tp=2", "dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=1") for mode in (False, True)
    }
