"""`apply_plan`: what it refuses leaves the model as it was; what it accepts has the properties promised."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import apply_jobs
import refusal_jobs
import unexpected_jobs
from pool import Pool
from shardplan import check_plan
from shardplan.diagnostics import Severity

REFUSALS = {
    "unequal weights": ["SP303"],
    "permuted rows": ["SP303"],
    "ranks in different modes": ["SP303"],
    "a mesh smaller than the world": ["SP301"],
    "an unnamed mesh": ["SP301"],
    "an unknown axis": ["SP301"],
    "two names for dp": ["SP301"],
    "a missing file": ["SP001"],
    "a directory": ["SP001"],
    "no shipped plan of that name": ["SP001"],
    "not YAML": ["SP002"],
    "a YAML list": ["SP008"],
    "an empty file": ["SP012"],
    "an unknown key": ["SP007"],
    "a wrong type": ["SP008"],
    "an empty dict": ["SP008"],
    "a dict of numbers": ["SP008"],
    "an unknown style": ["SP101"],
    "mixed precision without dp": ["SP304"],
    "offload without dp": ["SP304"],
    "recompute of nothing": ["SP108"],
    "recompute as a flag": ["SP008"],
}


@pytest.mark.parametrize("call", REFUSALS)
def test_refused_on_every_rank_and_untouched(pool: Pool, call: str) -> None:
    for codes, text, untouched in pool.run(2, refusal_jobs.refused, call):
        assert codes == REFUSALS[call], text
        assert untouched


def test_a_plan_for_another_model(pool: Pool) -> None:
    for codes, text, untouched in pool.run(2, refusal_jobs.refused, "a plan for another model"):
        assert codes[0] == "SP106"
        assert "plan 'gemma3' is not for LlamaForCausalLM" in text
        assert untouched


def test_one_refusing_rank_stops_all(pool: Pool) -> None:
    (first, *_), (second, text, untouched) = pool.run(2, refusal_jobs.refused, "one rank refuses")
    assert "SP102" in first
    assert second == ["SP303"]
    assert "another rank refused the plan" in text
    assert untouched


def test_applied_twice_is_an_error(pool: Pool) -> None:
    """C08."""
    assert pool.run(2, refusal_jobs.applied_twice) == [(["SP302"], True)] * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [33, 99])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_odd_vocabulary(pool: Pool, vocabulary: int, tied: bool, mesh: str) -> None:
    """C39."""
    ranks = 4 if "dp" in mesh else 2
    assert pool.run(ranks, apply_jobs.odd_vocabulary, vocabulary, tied, mesh) == [[]] * ranks


def test_odd_vocabulary_is_cut_into_17_and_16_rows(pool: Pool) -> None:
    """C39."""
    assert pool.run(2, apply_jobs.embedding_rows, 33) == [17, 16]


@pytest.mark.parametrize("padding_idx", [0, 3, 200])
def test_padding_row(pool: Pool, padding_idx: int) -> None:
    assert pool.run(2, apply_jobs.padding_row, padding_idx) == [[], []]


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        ("dp_shard=2,cp=2", (16, 64)),  # C25: flattened, not HSDP
        ("dp_replicate=2,dp_shard=2", (32, 64)),
        ("dp=2,tp=2", (16, 64)),
        ("dp_replicate=2,dp=1,tp=2", (32, 64)),
        ("dp=1,cp=2,tp=2", (16, 64)),
    ],
)
def test_local_rows(pool: Pool, mesh: str, shape: tuple[int, int]) -> None:
    assert pool.run(4, apply_jobs.local_rows, mesh) == [shape] * 4


@pytest.mark.parametrize("model", ["llama", "llama-tied", "gemma3"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2", "dp=2"])
def test_meta_device(pool: Pool, model: str, mesh: str) -> None:
    assert pool.run(2, apply_jobs.from_meta, model, mesh) == [[], []]


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3", "gemma3-vision"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_generate(pool: Pool, model: str, sequence_parallel: bool) -> None:
    for expected, actual in pool.run(2, apply_jobs.generated, model, "dp=1,tp=2", sequence_parallel):
        assert actual == expected


def test_kinds_of_logits(pool: Pool) -> None:
    assert pool.run(2, apply_jobs.kinds_of_logits) == [["DTensor", "Tensor", "DTensor", "Tensor"]] * 2


def test_hidden_states_are_whole(pool: Pool) -> None:
    assert pool.run(2, apply_jobs.hidden_states) == [[], []]


def test_a_second_reader_of_the_final_states(pool: Pool) -> None:
    assert pool.run(2, apply_jobs.second_reader) == [[], []]


def test_deep_copy_and_autograd_grad(pool: Pool) -> None:
    assert pool.run(2, apply_jobs.copied_and_differentiated) == [[], []]


@pytest.mark.parametrize("trained", ["norm", "q_norm", "proj", "mlp", "lm_head", "layers.1"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2"])
def test_partly_frozen(pool: Pool, mesh: str, trained: str) -> None:
    assert pool.run(2, apply_jobs.partly_frozen, mesh, trained) == [[], []]


@pytest.mark.parametrize("what", unexpected_jobs.UNEXPECTED)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_models_built_otherwise(pool: Pool, what: str, mesh: str, sequence_parallel: bool) -> None:
    assert pool.run(2, unexpected_jobs.unexpected, what, mesh, sequence_parallel) == [[], []]


@pytest.mark.parametrize("positions", ["absent", "given", "restarting"])
def test_c35_positions_under_sequence_parallel(pool: Pool, positions: str) -> None:
    assert max(pool.run(2, apply_jobs.largest_logit_difference, positions)) <= 1e-6


def test_auto_says_when_no_plan_is_shipped() -> None:
    with torch.device("meta"):
        model = OPTForCausalLM(OPTConfig(num_hidden_layers=1))
    (finding,) = check_plan("auto", model, "tp=2")
    assert (finding.code, finding.severity) == ("SP106", Severity.ERROR)
    assert finding.message == "no plan is shipped for OPTForCausalLM, and transformers has none for it"


def test_methods_beside_forward_read_local_weights(pool: Pool) -> None:
    assert pool.run(2, apply_jobs.read_beside_forward) == [True, True]
