"""Guarantees broken on purpose, one at a time: each must turn a test red, or the suite is blind to it."""

import re

import pytest
import torch

import apply_jobs
import broken
import communication
import option_jobs
import parity
from parity import Batch, Case
from pool import Pool, PoolError

LAYERS = ["model.layers.0", "model.layers.1"]

# The embedding reduces straight into the cut stream, and nothing cuts it later.
CUT_EMBEDDING = {
    ".embed_tokens": {"style": "embedding_rowwise", "output": "partial -> stream"},
    ".layers.0": {"input": "stream"},
}

# breakage -> where it shows
PARITY = {
    "skip the sum of replicated gradients, tp alone": Case("llama", "tp=2", sequence_parallel=True),
    "skip the sum of replicated gradients, FSDP2": Case("llama", "dp=1,tp=2", sequence_parallel=True),
    "untie a weight": Case("llama-tied", "tp=2", sequence_parallel=False),
    "add a row-wise bias on every rank": Case("llama-biased", "tp=2", sequence_parallel=False),
    "count a whole stream's gradients tp times": Case("llama", "tp=2", sequence_parallel=True),
    "leave the head's gradient unsummed": Case("llama", "tp=2", sequence_parallel=True),
    "swap two sections": Case("phi3", "tp=2", sequence_parallel=False, training=False),
    "cut a convolution as one": Case("nemotron-h", "tp=2", sequence_parallel=False, training=False),
    "add the bias behind a latent projection on every rank": Case(
        "nemotron-h-biased", "tp=2", sequence_parallel=False, training=False
    ),
    "leave shared heads' gradients unsummed": Case("qwen2-1kv", "tp=2", sequence_parallel=False, training=False),
}


@pytest.mark.parametrize("breakage", PARITY)
def test_parity_notices(pool: Pool, breakage: str) -> None:
    faults = pool.run(2, broken.compare, breakage, PARITY[breakage], [Batch(), Batch(length=5)])
    assert all(faults)


def test_parity_notices_one_section_out_of_place_in_a_mixer(pool: Pool) -> None:
    case = Case("nemotron-h", "tp=2", sequence_parallel=True, training=False)
    assert all(pool.run(2, broken.compare, "swap two sections", case, [Batch()]))


@pytest.mark.parametrize("model", ["phi3", "gpt2", "nemotron-h"])
def test_forgotten_local_sizes_fit_no_shape(pool: Pool, model: str) -> None:
    case = Case(model, "tp=2", sequence_parallel=False)
    for error in pool.run(2, broken.error_of, "forget all local sizes", case):
        assert re.search(r"shape|split", error)


def test_the_fused_path_notices_forgotten_groups(pool: Pool) -> None:
    """Its shapes do not tell: see tests/test_mamba_kernels.py."""
    case = Case("nemotron-h", "tp=2", sequence_parallel=False, training=False)
    assert all(pool.run(2, broken.compare_fused, "forget a mixer's groups", case, [Batch()]))


def test_recomputation_notices(pool: Pool) -> None:
    case = Case("llama", "tp=2", sequence_parallel=True, options={"recompute": [".layers.*"]})
    for runs, faults in pool.run(2, broken.run, "ignore recompute", option_jobs.recomputed, case):
        assert faults == []  # the numbers cannot tell
        assert runs["0"] == 1
    twice = pool.run(2, broken.run, "keep the cache of recomputed layers", option_jobs.recomputed_with_cache)
    assert [length for _, length in twice] == [32, 32]


def test_layers_are_heard(pool: Pool) -> None:
    kinds = ["DTensor", "Tensor", "DTensor"]
    assert pool.run(2, apply_jobs.kinds_of_logits) == [[*kinds, "Tensor"]] * 2
    assert pool.run(2, broken.run, "ignore the upper layers", apply_jobs.kinds_of_logits) == [[*kinds, "DTensor"]] * 2


def test_tables_notice_a_cast(pool: Pool) -> None:
    assert pool.run(2, broken.run, "cast fp32 tables", option_jobs.table_dtypes) == [{torch.bfloat16}] * 2


def test_rotary_does_real_work(pool: Pool) -> None:
    """With it a plan whose embedding gives the cut stream is exact; without it the tables fit no sequence."""
    case = Case("llama", "tp=2", sequence_parallel=True, options={"overrides": CUT_EMBEDDING})
    batches = [Batch(), Batch(length=5), Batch(mask=True), Batch(positions="restarting")]
    assert pool.run(2, parity.compare, case, batches) == [[], []]
    with pytest.raises(PoolError):
        pool.run(2, broken.compare, "leave positions to the model", case, [Batch()])


def test_units_are_wrapped(pool: Pool) -> None:
    case = Case("llama", "dp=2", sequence_parallel=False)
    assert pool.run(2, broken.fsdp_units, None, case) == [["", *LAYERS]] * 2
    assert pool.run(2, broken.fsdp_units, "ignore the FSDP2 units", case) == [[""]] * 2


def test_counting_notices_edges_inside_blocks(pool: Pool) -> None:
    """The gradients are right: only the count tells that q, k, v, gate and up each sum their own input gradient."""
    case = Case("llama", "tp=2", sequence_parallel=False)
    (clean, _), (counts, _) = (
        pool.run(2, communication.collectives, case),
        pool.run(2, broken.counts, "sum in each linear", case),
    )
    assert clean["backward"] == {"all_reduce": 5}
    assert counts["backward"] == {"all_reduce": 15}


def test_counting_notices_a_second_gather(pool: Pool) -> None:
    case = Case("llama", "tp=2", sequence_parallel=True)
    (clean, _), (counts, _) = (
        pool.run(2, communication.collectives, case),
        pool.run(2, broken.counts, "gather twice", case),
    )
    assert clean["forward"]["all_gather"] == 5
    assert counts["forward"]["all_gather"] == 10


def test_recomputation_runs_in_the_mode_of_its_forward(pool: Pool) -> None:
    case = Case("llama", "tp=2", sequence_parallel=True)
    assert pool.run(2, broken.unsynced_modes, None, case) == [[], []]
    with pytest.raises(PoolError):  # the recomputed shapes are others
        pool.run(2, broken.unsynced_modes, "forget the mode before recomputation", case)
