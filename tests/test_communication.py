"""The communication contract, counted exactly: one collective each way at each edge of a block, and no more."""

from collections import Counter

import pytest

import communication
from parity import Case
from pool import Pool
from tiny_models import MODELS

LAYERS = 2
TP = {"forward": {"all_reduce": 2 * LAYERS + 1}, "backward": {"all_reduce": 2 * LAYERS + 1}}
SP_FORWARD = {"all_reduce": 1, "all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS}
SP_BACKWARD = {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS + 1}


def sp(sums: int) -> dict[str, dict[str, int]]:
    """10 + 10 for two layers, and one coalesced sum for each unit with replicated parameters on the stream."""
    return {"forward": SP_FORWARD, "backward": {**SP_BACKWARD, "all_reduce": sums}}


HEAD_NORMS = ("qwen3", "gemma3", "gemma3-vision")  # their gradients are partial in both modes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2", "dp=2,tp=2"])
def test_tensor_parallel(pool: Pool, model: str, mesh: str) -> None:
    case = Case(model, mesh, sequence_parallel=False)
    sums = (1 if mesh == "tp=2" else LAYERS) if model in HEAD_NORMS else 0
    for counts in pool.run(case.world_size, communication.collectives, case, shared=True):
        assert counts == {**TP, "backward": {"all_reduce": TP["backward"]["all_reduce"] + sums}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("mesh", "sums"), [("tp=2", 1), ("dp=1,tp=2", LAYERS + 1), ("dp=2,tp=2", LAYERS + 1)])
def test_sequence_parallel(pool: Pool, model: str, mesh: str, sums: int) -> None:
    case = Case(model, mesh, sequence_parallel=True)
    for counts in pool.run(case.world_size, communication.collectives, case, shared=True):
        assert counts == sp(sums)


def test_a_length_that_tp_does_not_divide_runs_whole(pool: Pool) -> None:
    """C34: the same collectives as tensor parallel, plus the sums, whose share each rank has scaled down."""
    case = Case("llama", "tp=2", sequence_parallel=True)
    for counts in pool.run(2, communication.collectives, case, 5):
        assert counts == {"forward": TP["forward"], "backward": {"all_reduce": TP["backward"]["all_reduce"] + 1}}


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3-vision", "nemotron-h", "phi3", "gpt2", "qwen2-1kv"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_the_compiled_plan_lists_what_runs(pool: Pool, mesh: str, sequence_parallel: bool, model: str) -> None:
    case = Case(model, mesh, sequence_parallel)
    assert pool.run(case.world_size, communication.counted_against_plan, case, shared=True) == [[]] * case.world_size


# Where KV heads are shared: (model, tp, its attention layers, the ranks that share one, and its layers with edges).
SHARED = [
    ("llama-2kv", 4, LAYERS, 2, LAYERS * 2),
    ("phi3", 4, LAYERS, 2, LAYERS * 2),
    ("nemotron-h", 4, 1, 2, 5),
    ("qwen2-1kv", 2, LAYERS, 2, LAYERS * 2),
    ("llama-1kv", 4, LAYERS, 4, LAYERS * 2),
]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("model", "tp", "attentions", "ranks", "blocks"), SHARED)
def test_shared_heads_are_gathered_among_neighbours(
    pool: Pool, model: str, tp: int, attentions: int, ranks: int, blocks: int, sequence_parallel: bool
) -> None:
    """Keys and values, each way once in each attention; over tp runs what runs without."""
    case = Case(model, f"tp={tp}", sequence_parallel)
    partial = sequence_parallel or model == "nemotron-h"  # whose routers see a part of the work in both modes
    over_tp = {
        "forward": {"all_reduce": 1, "all_gather": blocks + 1, "reduce_scatter": blocks}
        if sequence_parallel
        else {"all_reduce": blocks + 1},
        "backward": {"all_reduce": 1, "all_gather": blocks + 1, "reduce_scatter": blocks + 1}
        if sequence_parallel
        else {"all_reduce": blocks + 1 + partial},
    }
    among = {"forward": {"all_gather": 2 * attentions}, "backward": {"reduce_scatter": 2 * attentions}}
    everyone = tuple(range(tp))
    for rank, counts in enumerate(pool.run(tp, communication.collectives_by_ranks, case)):
        first = rank // ranks * ranks
        neighbours = tuple(range(first, first + ranks))
        for direction in ("forward", "backward"):
            expected = {everyone: Counter(over_tp[direction])}
            expected[neighbours] = expected.get(neighbours, Counter()) + Counter(among[direction])
            assert counts[direction] == expected


@pytest.mark.parametrize(("model", "tp"), [("llama-2kv", 2), ("phi3", 2), ("nemotron-h", 2), ("phi3-mha", 4)])
def test_where_tp_divides_the_kv_heads_nothing_is_gathered(pool: Pool, model: str, tp: int) -> None:
    case = Case(model, f"tp={tp}", sequence_parallel=False)
    for counts in pool.run(tp, communication.collectives_by_ranks, case):
        assert [set(counts[direction]) for direction in counts] == [{tuple(range(tp))}] * 2
        assert {kind for by_ranks in counts.values() for kinds in by_ranks.values() for kind in kinds} == {"all_reduce"}


def test_labels_cost_two_small_all_reduces(pool: Pool) -> None:
    """The maximum and the sums; logits are never gathered, and the loss adds nothing to the backward."""
    for counts in pool.run(2, communication.loss_collectives, Case("llama", "tp=2", sequence_parallel=False)):
        assert counts["with"]["all_reduce"] == counts["without"]["all_reduce"] + 2
        assert set(counts["with"]) == {"all_reduce"}
        assert counts["backward"] == TP["backward"]


def test_sums_wait_for_the_synchronising_micro_batch(pool: Pool) -> None:
    case = Case("llama", "dp=1,tp=2", sequence_parallel=True)
    for first, last in pool.run(2, communication.no_sync_collectives, case):
        assert first["backward"] == SP_BACKWARD
        assert last["backward"] == {**SP_BACKWARD, "all_reduce": LAYERS + 1}
