"""Weights' gradients are made while that of a block's input is summed, and are right in every kind of backward."""

from __future__ import annotations

from pathlib import Path

import pytest

import overlap_jobs
from parity import Case
from pool import Pool

MESHES = ["tp=2", "dp=1,tp=2"]
MODES = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "SP"])


@MODES
def test_products_run_meanwhile(pool: Pool, sequence_parallel: bool) -> None:
    """Those of gate and up, and of q, k and v; and the head's where an edge of its own sums, which is in TP.

    SP sends more, and has nothing to do meanwhile: it gathers what was scattered, and sums the norms at the end.
    """
    layer = [0, 2, 0, 3] if sequence_parallel else [2, 3]
    expected = [0, *layer, *layer, 0, 0] if sequence_parallel else [1, *layer, *layer]
    case = Case("llama", "tp=2", sequence_parallel)
    assert pool.run(2, overlap_jobs.products_meanwhile, case) == [expected, expected]


@MODES
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", overlap_jobs.BACKWARDS)
def test_every_kind_of_backward(pool: Pool, kind: str, mesh: str, sequence_parallel: bool) -> None:
    case = Case("llama", mesh, sequence_parallel)
    if kind in ("asked_for", "of_one_linear") and "dp" in mesh:
        pytest.skip("FSDP2's parameters are in no graph, and are freed by the first of two backwards")
    assert pool.run(2, overlap_jobs.different, case, kind) == [[], []]


@MODES
def test_second_derivatives_are_refused(pool: Pool, sequence_parallel: bool) -> None:
    """Sums over tp are in no graph: what came of it was another number, and nothing said so."""
    for said in pool.run(2, overlap_jobs.differentiated_again, Case("llama", "tp=2", sequence_parallel)):
        assert said.startswith("create_graph=True: gradients of a model that is cut over tp cannot be differentiated")


@MODES
def test_recomputed_blocks(pool: Pool, tmp_path: Path, sequence_parallel: bool) -> None:
    """The block's input is converted, and its weights are read, outside of what is recomputed."""
    plan = tmp_path / "blocks.yaml"
    plan.write_text('{format: 1, extends: llama, recompute: [".layers.*.self_attn", ".layers.*.mlp"]}')
    case = Case("llama", "tp=2", sequence_parallel, plan=plan)
    assert pool.run(2, overlap_jobs.different, case, "once") == [[], []]


@MODES
def test_under_autocast(pool: Pool, sequence_parallel: bool) -> None:
    assert pool.run(2, overlap_jobs.under_autocast, Case("llama", "tp=2", sequence_parallel)) == [[], []]


@pytest.mark.parametrize("unit", [".layers.*.self_attn", ".layers.*.self_attn.q_proj"])
def test_units_of_their_own(pool: Pool, tmp_path: Path, unit: str) -> None:
    """A unit inside the block gathers its weight later than the block begins."""
    plan = tmp_path / "units.yaml"
    plan.write_text(f'{{format: 1, extends: llama, fsdp: {{units: {{"{unit}": {{}}, ".layers.*": {{}}}}}}}}')
    case = Case("llama", "dp=2,tp=2", sequence_parallel=True, plan=plan)
    assert pool.run(4, overlap_jobs.different, case, "twice") == [[]] * 4
