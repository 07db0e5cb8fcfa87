"""`torch.compile` of decoder layers: one graph each, edges and all, and the parity contract as without it."""

import pytest

import compile_jobs
from parity import Batch, Case
from pool import Pool

MASKED = Batch(mask=True)
CASES = {
    "tp": (Case("llama", "tp=2", sequence_parallel=False), MASKED),
    "sp": (Case("llama", "tp=2", sequence_parallel=True), MASKED),
    "sp-fsdp2": (Case("gemma3", "dp=1,tp=2", sequence_parallel=True), MASKED),
    # torch 2.13 cannot compile recomputed layers of DTensors with SDPA, whoever made them: docs/training.md.
    "sp-recomputed": (
        Case("llama", "tp=2", sequence_parallel=True, options={"recompute": [".layers.*"]}),
        Batch(attention="eager"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_layer_is_one_graph_and_exact(pool: Pool, case: str) -> None:
    for graphs, faults in pool.run(2, compile_jobs.compiled, *CASES[case], timeout=300.0):
        assert faults == []
        assert graphs > 0


def test_a_graph_break_is_noticed(pool: Pool) -> None:
    case = Case("llama", "tp=2", sequence_parallel=True)
    for said in pool.run(2, compile_jobs.breaks_on_purpose, case):
        assert "graph_break" in said
