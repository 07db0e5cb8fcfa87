"""The communication contract, counted exactly: one collective each way at each edge of a block, and no more."""

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
    for counts in pool.run(case.world_size, communication.collectives, case):
        assert counts == {**TP, "backward": {"all_reduce": TP["backward"]["all_reduce"] + sums}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("mesh", "sums"), [("tp=2", 1), ("dp=1,tp=2", LAYERS + 1), ("dp=2,tp=2", LAYERS + 1)])
def test_sequence_parallel(pool: Pool, model: str, mesh: str, sums: int) -> None:
    case = Case(model, mesh, sequence_parallel=True)
    for counts in pool.run(case.world_size, communication.collectives, case):
        assert counts == sp(sums)


def test_a_length_that_tp_does_not_divide_runs_whole(pool: Pool) -> None:
    """C34: the same collectives as tensor parallel, plus the sums, whose share each rank has scaled down."""
    case = Case("llama", "tp=2", sequence_parallel=True)
    for counts in pool.run(2, communication.collectives, case, 5):
        assert counts == {"forward": TP["forward"], "backward": {"all_reduce": TP["backward"]["all_reduce"] + 1}}


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3-vision"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_the_compiled_plan_lists_what_runs(pool: Pool, mesh: str, sequence_parallel: bool, model: str) -> None:
    case = Case(model, mesh, sequence_parallel)
    assert pool.run(case.world_size, communication.counted_against_plan, case) == [[]] * case.world_size


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
