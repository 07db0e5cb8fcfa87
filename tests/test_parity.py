"""The parity contract, pairwise: every pair of settings occurs for the families that differ most.

Several batches share one applied model. `python tests/full_parity.py` runs every combination.
"""

from pathlib import Path
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


# Those that differ most; each of the others is one of them with something taken away, and meets two meshes.
FAMILIES = ["llama-biased", "qwen2-tied", "qwen3", "gemma3-vision"]
OTHERS = [name for name in MODELS if name not in FAMILIES]
SETTINGS = [
    *pairwise(model=FAMILIES, mesh=MESHES, sequence_parallel=[False, True], recomputation=list(RECOMPUTATION)),
    *(
        {"model": name, "mesh": mesh, "sequence_parallel": cut is (number % 2 == 0), "recomputation": recomputation}
        for number, name in enumerate(OTHERS)
        for mesh, cut, recomputation in (("tp=2", True, "layers"), ("dp=2,tp=2", False, "none"))
    ),
]
CASES = sorted(  # those of one mesh may share a world
    ((case(**settings), BATCHES[number % 4 :: 4]) for number, settings in enumerate(SETTINGS)),
    key=lambda pair: pair[0].mesh,
)


@pytest.mark.parametrize(("case", "batches"), CASES, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_parity(pool: Pool, case: Case, batches: list[Batch]) -> None:
    faults = pool.run(case.world_size, parity.compare, case, batches, shared=True)
    assert faults == [[]] * case.world_size


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bias_with_a_rule_of_its_own(pool: Pool, tmp_path: Path, sequence_parallel: bool) -> None:
    (tmp_path / "plan.yaml").write_text(
        'format: 1\nextends: llama\nrules: {".layers.*.self_attn.o_proj.bias": null, '
        '".layers.*.mlp.down_proj.bias": replicated_with_grad_allreduce}\n'
    )
    case = Case("llama-biased", "dp=2,tp=2", sequence_parallel, plan=tmp_path / "plan.yaml", training=False)
    assert pool.run(4, parity.compare, case, [Batch()], shared=True) == [[]] * 4


@pytest.mark.parametrize(("mesh", "sequence_parallel"), [("tp=2", False), ("tp=2", True), ("dp=2,tp=2", True)])
def test_parity_with_images(pool: Pool, mesh: str, sequence_parallel: bool) -> None:
    """The vision tower ends in torch's MultiheadAttention, which reads the weights of a module it never calls."""
    case = Case("gemma3-vision", mesh, sequence_parallel)
    batches = [Batch(length=16, image=True), Batch(length=9, image=True)]
    assert pool.run(case.world_size, parity.compare, case, batches, shared=True) == [[]] * case.world_size


def test_every_model_meets_every_mesh_and_every_batch() -> None:
    assert {(case.model, case.mesh) for case, _ in CASES} >= {(model, mesh) for model in FAMILIES for mesh in MESHES}
    assert {case.model for case, _ in CASES} == set(MODELS)
    assert {(case.mesh, case.sequence_parallel) for case, _ in CASES} >= {
        (m, sp) for m in MESHES for sp in (False, True)
    }
    assert {batch for _, batches in CASES for batch in batches} == set(BATCHES)
