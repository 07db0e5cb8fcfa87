"""docs/migrating-from-nemo-rl.md has a line for every name of NeMo-RL's module, and says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardplan
import training_jobs
from pool import Pool
from shardplan.resources import shipped_plans

PAGE = (Path(__file__).parents[1] / "docs" / "migrating-from-nemo-rl.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*\|$", PAGE, re.MULTILINE)]
HERE = {name: there for names, there, *_ in ROWS for name in re.findall(r"`(\w+)", names)}

# The public names of nemo_rl/models/dtensor/parallelize.py, and those that its workers import or that it is made of.
NAMES = [
    "PARALLIZE_FUNCTIONS",
    "RotaryEmbedParallel",
    "_parallelize_gemma3",
    "_parallelize_llama",
    "_parallelize_model",
    "_parallelize_nm5_h",
    "_parallelize_qwen",
    "clip_grad_by_total_norm_",
    "get_grad_norm",
    "get_hf_tp_plan",
    "get_logprobs_from_vocab_parallel_logits",
    "to_local_if_dtensor",
    "translate_parallel_style",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_line_for_every_name(name: str) -> None:
    there = HERE[name]
    assert (there == "the same") == (name in shardplan.__all__)
    for plan in re.findall(r"plans/(\w+)\.yaml", there):
        assert plan in shipped_plans()


def test_log_probs_as_the_page_has_it(pool: Pool) -> None:
    expression = HERE["get_logprobs_from_vocab_parallel_logits"].strip("`")
    for difference in pool.run(2, training_jobs.log_probs_by, expression):
        assert difference <= 1e-5
