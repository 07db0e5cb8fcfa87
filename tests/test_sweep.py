"""A sample of docs/coverage.md, another one every day: what the sweep (tests/sweep.py) says is still so."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

import sweep
import sweep_flags
import sweep_hf
import sweep_table
import tiny_models
from pool import LentRanks, Pool
from refusals import REVIEWED
from shardplan.inventory import take_inventory
from shardplan.verify.shrink import shrink
from sweep_rows import EXACT, Row, read_record, record

SAMPLE = 1  # type of model a day
TABLE = sweep_table.read_table()


def of_today() -> list[str]:
    names, first = sorted(TABLE), SAMPLE * date.today().toordinal()
    return [names[(first + number) % len(names)] for number in range(SAMPLE)]


@pytest.mark.parametrize("name", of_today())
def test_the_table_still_holds(pool: Pool, name: str) -> None:
    row = sweep.look(LentRanks(pool, 2), Row(name))
    assert (row.tp, row.sp) == TABLE[name]


def test_nothing_is_wrong_that_the_checks_let_pass() -> None:
    departs = [name for name, verdicts in TABLE.items() for verdict in verdicts if verdict[:5] in ("WRONG", "raise")]
    assert departs == []


def test_every_refusal_is_reviewed() -> None:
    """With its modes and its code, and nothing is in the list that is no longer refused."""
    refused: dict[str, tuple[tuple[str, ...], set[str]]] = {}
    for name, verdicts in TABLE.items():
        said = {mode: verdict for mode, verdict in zip(("TP", "SP"), verdicts, strict=True) if "refused:" in verdict}
        if said:
            refused[name] = tuple(said), {verdict.split()[1] for verdict in said.values()}
    assert refused == {name: (known.modes, {known.code}) for name, known in REVIEWED.items()}


def test_no_flipped_field_makes_what_is_exact_wrong() -> None:
    """A model that is refused in turn is fine; one that computes otherwise and passes the checks is not."""
    wrong = {
        (name, field)
        for (name, field), flipped in sweep_table.read_flags().items()
        for before, after in zip(TABLE[name], flipped, strict=True)
        if before == EXACT and after.startswith("WRONG")
    }
    assert wrong == set()


def test_the_table_has_no_other_types() -> None:
    assert set(TABLE) <= set(sweep.types())


# ---------------------------------------------------------------- the passes

OLD = {"type": "llama", "model": "LlamaForCausalLM", "tp": "exact", "sp": "exact", "body": 100.0, "calls": 130,
       "hf_calls": 195, "seconds": 3.1}  # fmt: skip


def test_a_record_keeps_what_each_pass_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(OLD) + "\n")
    (row,) = read_record(path).values()
    assert (row.tp, row.hf, row.flags) == (EXACT, "", None)
    fuller = replace(row, hf="crash: it raised", flags={"mlp_bias=true": (EXACT, "refused: SP206")})
    record(path, fuller)
    assert read_record(path) == {"llama": fuller}


def test_the_table_says_what_each_pass_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = {"mlp_bias=true": (EXACT, "WRONG: SP404 | off"), "attention_bias=true": (EXACT, EXACT)}
    rows = [
        Row(**{**OLD, "hf": "wrong gradients at once: q", "hf_body": 40.0, "flags": flags}),
        Row(**{**OLD, "type": "qwen3", "hf": EXACT, "hf_body": 100.0}),
        Row(**{**OLD, "type": "glm"}),
    ]
    text = sweep_table.table(rows, total=4)
    assert "Looked at so far: 3 of 4 types." in text
    assert (
        "- transformers' own TP: 1 of 2 exact, 1 wrong gradients at once; 1 of its exact ones cut at least 90 % of the "
        "body\n"
    ) in text
    assert "- SP: 1 WRONG, 1 exact\n" in text
    monkeypatch.setattr(sweep_table, "DOCUMENT", tmp_path / "coverage.md")
    sweep_table.DOCUMENT.write_text(text)
    assert sweep_table.read_table() == dict.fromkeys(("llama", "qwen3", "glm"), (EXACT, EXACT))
    assert sweep_table.read_flags() == {("llama", "mlp_bias=true"): (EXACT, "WRONG: SP404 / off")}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", ""),
        ("qwen3", "wrong gradients from the second micro-batch: model.layers.*.self_attn.k_norm.weight is off by "),
    ],
)
def test_transformers_own(pool: Pool, tmp_path: Path, name: str, said: str) -> None:
    """transformers 5.24 sums the accumulated gradient of a head norm after every backward."""
    model = tiny_models.build_meta(name)
    build = shrink(model, 2, 2)
    for found in pool.run(2, sweep_hf.compare, build, str(tmp_path)):
        assert found.startswith(said)
        assert bool(found) == bool(said)


def test_what_of_a_body_transformers_cuts() -> None:
    """Beside biases behind row-wise linears: attention's projections and norms, without the MLP."""
    model = tiny_models.build_meta("llama-biased")
    for name in ("gate", "up", "down"):
        del model.tp_plan[f"model.layers.*.mlp.{name}_proj"]  # type: ignore[union-attr,operator]
    hidden, kv = 64, 32
    cut = hidden * (hidden + 1) + 2 * kv * (hidden + 1) + hidden * hidden
    layer = sum(parameter.numel() for parameter in model.get_submodule("model.layers.0").parameters())
    assert sweep_hf.share(take_inventory(model)) == round(100 * 2 * cut / (2 * layer + hidden), 1)


MOE = {**tiny_models.SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({}, False),
        ({"output_router_logits": True}, False),
        ({"norm_topk_prob": True}, True),
        ({"qkv_bias": False}, True),
    ],
)
def test_which_fields_change_a_model(fields: dict[str, bool], changed: bool) -> None:
    """By what its loss is made of, its logits alone, its parameters."""
    default, flipped = sweep.build("qwen2_moe", **MOE), sweep.build("qwen2_moe", **{**MOE, **fields})
    assert sweep_flags.changes(default, flipped) is changed
    names = {name for name, _ in sweep_flags.booleans(default.config)}
    assert names >= {"output_router_logits", "norm_topk_prob", "qkv_bias", "tie_word_embeddings"}
    assert not names & {"output_attentions", "return_dict"}
