"""The parity contract for Nemotron-H: Mamba-2 mixers, attention, MLPs and experts under one name."""

from typing import Any

import pytest
import torch

import hybrid_jobs
import option_jobs
import parity
import tiny_models
from pairs import pairwise
from parity import Batch, Case
from pool import Pool
from shardplan import check_plan
from shardplan.diagnostics import Diagnostic, Severity

# One applied model takes a third of them. A length of 16 is cut; the others run whole.
BATCHES = [
    Batch(labels=settings["length"] > 1, **settings)
    for settings in pairwise(
        length=[16, 7, 5, 1],
        attention=["sdpa", "eager"],
        mask=[False, True],
        positions=["absent", "given", "restarting"],
    )
]

# Every model meets tp 4, which shares the KV heads, in one mode and (2, 2) in the other; some tp 2 alone.
CASES = [
    (Case("nemotron-h", "tp=2", sequence_parallel=False, training=False), BATCHES[0::3]),
    (Case("nemotron-h", "tp=2", sequence_parallel=True, training=False), BATCHES[1::3]),
    (Case("nemotron-h-groups-8", "tp=2", sequence_parallel=True, training=False), BATCHES[2::3]),
]
CASES += [
    (
        Case(f"nemotron-h{variant}", mesh, cuts, training="dp" in mesh and variant in ("", "-biased")),
        BATCHES[number % 3 :: 3],
    )
    for number, (variant, mesh, cuts) in enumerate(
        (variant, mesh, cuts_at_4 is (mesh == "tp=4"))
        for mesh in ("tp=4", "dp=2,tp=2")
        for variant, cuts_at_4 in (("", True), ("-biased", False), ("-groups-8", True), ("-backbone", False))
    )
]


@pytest.mark.parametrize(("case", "batches"), CASES, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_parity(pool: Pool, case: Case, batches: list[Batch]) -> None:
    assert pool.run(case.world_size, parity.compare, case, batches, shared=True) == [[]] * case.world_size


def test_every_batch_is_met_with_and_without_dp() -> None:
    for dp in (False, True):
        assert {batch for case, batches in CASES if ("dp" in case.mesh) is dp for batch in batches} == set(BATCHES)


# ---------------------------------------------------------------- the fused path

RIGHT_PADDED = [Batch(mask=True, labels=True), Batch(7, mask=True, labels=True), Batch(5), Batch(1)]
FUSED = {"mamba_split_conv1d_scan_combined": 2.0 * 2}  # two mixers, sharded and not; no other kernel


@pytest.mark.parametrize(
    ("model", "mesh", "sequence_parallel"),
    [
        ("nemotron-h-biased", "tp=2", True),
        ("nemotron-h", "tp=2", False),
        ("nemotron-h-biased", "tp=4", False),
        ("nemotron-h-groups-8", "tp=4", True),
    ],
)
def test_the_fused_path(pool: Pool, model: str, mesh: str, sequence_parallel: bool) -> None:
    """It reads the weights of conv1d, norm and out_proj, bias included, and calls none of these modules."""
    case = Case(model, mesh, sequence_parallel, training=False)
    assert pool.run(case.world_size, hybrid_jobs.fused, case, RIGHT_PADDED) == [([], FUSED)] * case.world_size


# ---------------------------------------------------------------- recomputation by kind of block, bf16

MODULES = {
    "mamba": "model.layers.0.mixer",
    "in_proj": "model.layers.0.mixer.in_proj",
    "experts": "model.layers.1.mixer",
    "attention": "model.layers.2.mixer",
    "mlp": "model.layers.3.mixer",
    "last mamba": "model.layers.4.mixer",
}
ONCE = dict.fromkeys(MODULES, 1)


@pytest.mark.parametrize(
    ("mesh", "sequence_parallel", "patterns", "twice"),
    [
        ("tp=2", True, [".layers.*.mixer@*Mamba2*"], {"mamba", "in_proj", "last mamba"}),
        ("dp=1,tp=2", False, [".layers.*.mixer@*Mamba2*"], {"mamba", "in_proj", "last mamba"}),
        ("dp=1,tp=2", True, [".layers.*"], set(MODULES)),
        ("tp=2", False, [".layers.*.mixer@*{MoE,Attention}"], {"experts", "attention"}),
    ],
)
def test_recomputation_by_kind_of_block(
    pool: Pool, mesh: str, sequence_parallel: bool, patterns: list[str], twice: set[str]
) -> None:
    case = Case("nemotron-h", mesh, sequence_parallel, options={"recompute": patterns})
    expected = {**ONCE, **dict.fromkeys(twice, 2)}
    assert pool.run(2, option_jobs.recomputed, case, MODULES) == [(expected, [])] * 2


def test_mixed_precision(pool: Pool) -> None:
    for seen in pool.run(2, hybrid_jobs.in_bf16, "dp=1,tp=2", True):
        assert seen == {
            "parameters": {torch.float32},
            "gradients": {torch.float32},
            "finite": True,
            "replicas": [],
            "close": True,
        }


# ---------------------------------------------------------------- rules on top of the shipped plan

MIXER = "model.layers.*.mixer"
STATES = ("B: n_groups * ssm_state_size", "C: 32")
MAMBA, ATTENTION = ".layers.*.mixer@*Mamba2*", ".layers.*.mixer@*Attention"


def in_proj(*sections: str) -> dict[str, Any]:
    return {"style": "colwise", "sections": [dict([section.split(": ")]) for section in sections]}


def findings(overrides: dict[str, Any], sequence_parallel: bool = False) -> list[Diagnostic]:
    model = tiny_models.build_meta("nemotron-h")
    found = check_plan("nemotron_h", model, "tp=2", overrides=overrides, sequence_parallel=sequence_parallel)
    return [finding for finding in found if finding.severity is not Severity.NOTE]


@pytest.mark.parametrize("overrides", [{ATTENTION: None}, {".layers.0.mixer": None, ".layers.1.mixer": None}], ids=str)
def test_mixers_may_stay_whole(pool: Pool, overrides: dict[str, None]) -> None:
    """By a null on each; what is left of the plan stays as it is."""
    case = Case("nemotron-h", "tp=2", sequence_parallel=False, training=False, options={"overrides": overrides})
    assert pool.run(2, parity.compare, case, [Batch(mask=True), Batch(7, labels=True)]) == [[], []]


LATENT = ".layers.*.mixer.fc1_latent_proj"


@pytest.mark.parametrize("style", [None, "rotary", "replicate", "sequence_parallel"])
def test_what_experts_take_whole_may_be_called_whole_in_any_way(pool: Pool, style: str | None) -> None:
    """A rule on it makes its gradient a sum, as everything's inside a block."""
    overrides = {LATENT: style}
    assert [f.code for f in findings(overrides)] == (["SP206"] if style == "sequence_parallel" else [])
    case = Case("nemotron-h", "tp=2", sequence_parallel=True, training=False, options={"overrides": overrides})
    assert pool.run(2, parity.compare, case, [Batch(labels=True)]) == [[], []]


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_what_takes_the_experts_sum_is_not_cut(style: str) -> None:
    (found,) = findings({LATENT.replace("fc1", "fc2"): style})
    assert (found.code, found.hint) == ("SP203", "make fc2_latent_proj replicated_behind_parts")


@pytest.mark.parametrize("style", ["colwise", "colwise_gather_output"])
def test_what_experts_take_whole_is_not_cut(style: str) -> None:
    (found,) = findings({LATENT: style})
    assert found.code == "SP203"
    assert found.message.startswith(
        f"fc1_latent_proj is colwise, but the experts of block {MIXER} take all the features that it gives"
    )


@pytest.mark.parametrize("pattern", [ATTENTION, MAMBA, ".layers.0.mixer"])
def test_but_not_on_the_cut_stream_where_a_rank_sees_a_part_of_the_tokens(pattern: str) -> None:
    found = findings({pattern: None}, sequence_parallel=True)
    assert {finding.code for finding in found} == {"SP206"}
    assert {finding.hint for finding in found} <= {"make it a block", f"make {MIXER} a block"}
    (found,) = findings({pattern: "sequence_parallel"}, sequence_parallel=True)
    assert found.code == "SP105"
    assert found.message.startswith(f"{MIXER} mixes tokens, by attention or a convolution; ")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {".layers.*.mixer.in_proj": None},
            f"in_proj stays whole in block {MIXER}, where out_proj is rowwise",
        ),
        ({".layers.0.mixer.out_proj": None}, f"out_proj stays whole in block {MIXER}, where in_proj is colwise"),
        (
            {".layers.*.mixer.in_proj": "colwise"},
            f"{MIXER}.in_proj gives 200 features and out_proj takes 64: it packs sections, and a plain cut would give "
            "each rank parts of some of them only",
        ),
        (
            {".layers.*.mixer.conv1d": None},
            f"conv1d is whole in block {MIXER}, where mamba2 has it cut along dim 0 in sections of 64 + 32 + 32, with "
            "shares of groups, in_channels and out_channels",
        ),
        (
            {".layers.*.mixer.conv1d": "shard"},
            f"conv1d is cut along dim 0 as one in block {MIXER}, where mamba2 has it cut along dim 0 in sections of "
            "64 + 32 + 32, with shares of groups, in_channels and out_channels",
        ),
        (
            {".layers.*.mixer.in_proj": in_proj("dt: 8", "z: 64", "x: 64", *STATES)},
            f"in_proj is cut along dim 0 in sections of 8 + 64 + 64 + 32 + 32 in block {MIXER}, where mamba2 has it "
            "cut along dim 0 in sections of 64 + 64 + 32 + 32 + 8",
        ),
        ({".layers.*.mixer.norm": None}, f"norm is whole in block {MIXER}, where mamba2 has it cut along dim 0 as one"),
        (
            {".layers.*.mixer.norm": "replicated_with_grad_allreduce"},
            f"norm is whole in block {MIXER}, where mamba2 has it cut along dim 0 as one",
        ),
        ({".layers.*.mixer.D": None}, f"D is whole in block {MIXER}, where mamba2 has it cut along dim 0 as one"),
    ],
    ids=str,
)
def test_a_part_of_a_mixer_is_not_cut_in_another_way(
    overrides: dict[str, Any], message: str, sequence_parallel: bool
) -> None:
    """Wrong numbers without an error, or shapes that fit nowhere, would be the result."""
    (found,) = findings(overrides, sequence_parallel)
    assert found.severity is Severity.ERROR
    assert found.message == f"{message} (see plans/nemotron_h.yaml:13:3)" or found.message == message


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("said", ["block", {"input": "stream"}])
def test_a_mixer_does_not_leave_its_parts_to_another_rule(said: Any, sequence_parallel: bool) -> None:
    """They would be cut, and what counts heads and groups would not."""
    found = [f for f in findings({".layers.0.mixer": said}, sequence_parallel) if f.code == "SP203"]
    assert [(f.severity, f.message) for f in found] == [
        (
            Severity.ERROR,
            f"conv1d, in_proj, norm and out_proj of {MIXER} are cut by mamba2, but another rule decides about {MIXER} "
            "itself (see plans/nemotron_h.yaml:13:3)",
        )
    ]


def test_a_part_may_be_named_as_the_style_has_it() -> None:
    assert findings({".layers.*.mixer.in_proj": in_proj("z: 64", "x: intermediate_size", *STATES, "dt: 8")}) == []
