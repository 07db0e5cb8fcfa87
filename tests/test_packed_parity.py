"""The parity contract where projections are packed, KV heads are few, or sizes do not divide."""

from dataclasses import replace
from typing import Any

import pytest

import parity
from pairs import pairwise
from parity import Batch, Case
from pool import Pool

# One applied model takes a quarter of them. A length of 16 is cut; the others run whole.
BATCHES = [
    Batch(labels=settings["length"] > 1, **settings)
    for settings in pairwise(
        length=[16, 7, 5, 1],
        attention=["sdpa", "eager"],
        mask=[False, True],
        positions=["absent", "given", "restarting"],
    )
]
TIED: dict[str, Any] = {"changes": {"tie_word_embeddings": True}}

CASES = [
    # packed: a linear of q, k and v, one of gate and up, and GPT-2's, which is transposed and biased
    Case("phi3", "tp=4", True),
    Case("phi3", "dp=2,tp=2", False, training=False),
    Case("phi3", "tp=2", True, training=False),
    Case("phi3-mha", "tp=4", False, training=False),
    Case("phi3-mha", "dp=2,tp=2", True, training=False),
    Case("gpt2", "tp=4", True),
    Case("gpt2", "dp=2,tp=2", False, training=False),
    Case("gpt2", "tp=2", True, training=False),
    # fewer KV heads than ranks
    Case("llama-2kv", "tp=4", True),
    Case("llama-2kv", "tp=4", False, training=False),
    Case("llama-1kv", "tp=4", True, training=False),
    Case("llama-1kv", "dp=2,tp=2", False),
    Case("qwen2", "tp=4", True, training=False, changes={"num_key_value_heads": 2}),
    Case("qwen2", "tp=4", False, training=False, changes={"num_key_value_heads": 2}),
    Case("qwen2-1kv", "tp=2", True),
    Case("qwen2-1kv", "tp=4", False, training=False),
    # sizes that tp does not divide, with biases; C16 and C39
    Case("llama-odd", "tp=4", True, training=False),
    Case("llama-odd", "dp=2,tp=2", False, training=False),
    Case("llama-odd", "tp=4", False, **TIED),
    Case("llama-odd", "dp=2,tp=2", True, training=False, **TIED),
]
WITH_BATCHES = sorted(  # those of one mesh may share a world
    ((case, BATCHES[number % 4 :: 4]) for number, case in enumerate(CASES)), key=lambda pair: pair[0].mesh
)


@pytest.mark.parametrize(
    ("case", "batches"), WITH_BATCHES, ids=lambda value: str(value) if isinstance(value, Case) else ""
)
def test_parity(pool: Pool, case: Case, batches: list[Batch]) -> None:
    assert pool.run(case.world_size, parity.compare, case, batches, shared=True) == [[]] * case.world_size


def test_every_model_trains_and_meets_both_modes_and_four_ranks() -> None:
    models = {case.model for case in CASES}
    assert {case.model for case in CASES if case.training} == models - {"phi3-mha", "qwen2"}
    for sequence_parallel in (False, True):
        assert {case.model for case in CASES if case.sequence_parallel is sequence_parallel} == models
    assert {case.model for case in CASES if case.mesh == "tp=4"} == models
    assert {batch for _, batches in WITH_BATCHES for batch in batches} == set(BATCHES)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_attention_gathers_again(pool: Pool, sequence_parallel: bool) -> None:
    """Shared heads, gathered a second time while the backward runs, with packed projections joined twice."""
    case = Case("phi3", "tp=4", sequence_parallel, training=False, options={"recompute": [".layers.*.self_attn"]})
    assert pool.run(4, parity.compare, case, [Batch(), replace(BATCHES[0], length=5)], shared=True) == [[]] * 4
