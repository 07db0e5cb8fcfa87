"""Options of `apply_plan`, plans written in Python, and models that were wrapped before."""

import pytest
import torch

import option_jobs
import tiny_models
from parity import Case
from pool import Pool
from shardplan import check_plan
from shardplan.diagnostics import errors
from shardplan.styles import Gradient


@pytest.mark.parametrize("mesh", ["dp=1,tp=2", "dp=2"])
def test_mixed_precision(pool: Pool, mesh: str) -> None:
    for seen in pool.run(2, option_jobs.precision, mesh):
        assert seen["activation"] == torch.bfloat16
        assert seen["parameters"] == seen["gradients"] == {torch.float32}
        assert seen["tables"] == (torch.float32, True)
        assert 0 < seen["loss"] < 1e-2


def test_fp32_tables_stay_fp32(pool: Pool) -> None:
    assert pool.run(2, option_jobs.table_dtypes) == [{torch.float32}] * 2


@pytest.mark.parametrize("mesh", ["dp=1,tp=2", "dp=2"])
def test_cpu_offload(pool: Pool, mesh: str) -> None:
    assert pool.run(2, option_jobs.offloaded, mesh) == [({"cpu"}, [])] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2"])
@pytest.mark.parametrize(
    ("patterns", "runs"),
    [
        (None, {"0": 1, "self_attn": 1, "mlp": 1, "up_proj": 1}),
        ([".layers.*"], {"0": 2, "self_attn": 2, "mlp": 2, "up_proj": 2}),
        ([".layers.*.mlp"], {"0": 1, "self_attn": 1, "mlp": 2, "up_proj": 2}),
        ([".layers.1"], {"0": 1, "self_attn": 1, "mlp": 1, "up_proj": 1}),
    ],
)
def test_recomputation(
    pool: Pool, mesh: str, sequence_parallel: bool, patterns: list[str] | None, runs: dict[str, int]
) -> None:
    case = Case("llama", mesh, sequence_parallel, options={"recompute": patterns})
    assert pool.run(2, option_jobs.recomputed, case) == [(runs, [])] * 2


def test_recomputation_drops_the_cache(pool: Pool) -> None:
    assert pool.run(2, option_jobs.recomputed_with_cache) == [([], 0)] * 2


def test_a_row_of_ones_own(pool: Pool) -> None:
    assert pool.run(2, option_jobs.registered_row, Gradient.PARTIAL) == [[], []]


def test_a_native_style_is_applied_as_it_stands(pool: Pool) -> None:
    assert pool.run(2, option_jobs.native_style) == [2.0, 2.0]


@pytest.mark.parametrize("plan", list(option_jobs.PYTHON_PLANS))
@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2"])
def test_plans_from_python(pool: Pool, plan: str, mesh: str) -> None:
    assert pool.run(2, option_jobs.python_plan, plan, mesh) == [[], []]


CUT_EMBEDDING = {
    ".embed_tokens": {"style": "embedding_rowwise", "output": "partial -> stream"},
    ".layers.0": {"input": "stream"},
}


@pytest.mark.parametrize(
    ("model", "attention", "also", "message"),
    [
        ("llama", "sdpa", {}, ""),
        ("llama", "eager", {}, "eager attention needs a mask"),
        ("mistral", "sdpa", {}, "a sliding window needs a mask"),
        ("llama", "sdpa", {".rotary_emb": None}, "model.rotary_emb would count positions from that part"),
    ],
)
def test_a_cut_embedding_is_refused_where_a_mask_or_a_position_would_be_wrong(
    model: str, attention: str, also: dict[str, None], message: str
) -> None:
    meta = tiny_models.build_meta(model)
    meta.set_attn_implementation(attention)  # type: ignore[operator]
    overrides = [CUT_EMBEDDING, also] if also else CUT_EMBEDDING
    found = errors(check_plan("llama", meta, "tp=2", overrides=overrides, sequence_parallel=True))
    assert message in "".join(finding.message for finding in found)
    assert len(found) == bool(message)


@pytest.mark.parametrize("how", ["compile", "compile in place", "checkpoint"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_models_wrapped_before(pool: Pool, how: str, mesh: str, sequence_parallel: bool) -> None:
    assert pool.run(2, option_jobs.wrapped, how, mesh, sequence_parallel) == [[], []]
