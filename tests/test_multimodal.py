"""Models that see: the language model is cut, and the tower stays whole in FSDP2 units of its own, and that is said."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import prod
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn

import parity
import tiny_models
from multimodal import SEEING
from parity import Batch, Case
from pool import Pool
from shardplan import check_plan, compile_plan
from shardplan.checks.names import general
from shardplan.cli import command
from shardplan.compiled import CompiledParameter
from shardplan.diagnostics import Location, Severity
from shardplan.merge import HF
from shardplan.plan import Plan

pytestmark = pytest.mark.processes  # not quick: ten models of two kinds

OURS = Plan(HF, Location(HF), over_hf=True)
# Class -> the language model, the layers of the tower, and what else stands beside the language model.
PARTS = {
    "qwen2-vl": ("model.language_model", "model.visual.blocks.*", ()),
    "qwen2.5-vl": ("model.language_model", "model.visual.blocks.*", ()),
    "llava": ("model.language_model", "model.vision_tower.encoder.layers.*", ("model.multi_modal_projector",)),
    "llava-next": ("model.language_model", "model.vision_tower.encoder.layers.*", ("model.multi_modal_projector",)),
    "llava-next-video": (
        "model.language_model",
        "model.vision_tower.encoder.layers.*",
        ("model.multi_modal_projector",),
    ),
    "llava-onevision": (
        "model.language_model",
        "model.vision_tower.encoder.layers.*",
        ("model.multi_modal_projector",),
    ),
    "mistral3": ("model.language_model", "model.vision_tower.transformer.layers.*", ("model.multi_modal_projector",)),
    "smolvlm": ("model.text_model", "model.vision_model.encoder.layers.*", ("model.connector",)),
    "llama4": ("language_model.model", "vision_model.model.layers.*", ("multi_modal_projector",)),
    "gemma3-vision": ("model.language_model", "model.vision_tower.encoder.layers.*", ("model.multi_modal_projector",)),
}


@cache
def meta(name: str) -> nn.Module:
    return tiny_models.build_meta(name)


def elements(parameters: Iterable[CompiledParameter]) -> int:
    return sum(prod(parameter.shape) for parameter in parameters)


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_language_model_is_cut_and_the_tower_is_whole_in_units(name: str, sequence_parallel: bool) -> None:
    base, tower, _ = PARTS[name]
    model = meta(name)
    compiled = compile_plan(OURS, model, "dp=2,tp=2", sequence_parallel=sequence_parallel)
    language = [p for p in compiled.parameters if p.fqn.startswith(f"{base}.") or "lm_head" in p.fqn]
    others = [p for p in compiled.parameters if p not in language]
    assert elements(p for p in language if p.sharded) > 0.9 * elements(language)
    assert others
    assert not any(p.sharded for p in others)
    units = {general(unit.fqn) for unit in compiled.units}
    assert units >= {f"{base}.layers.*", tower}


@pytest.mark.parametrize("name", SEEING)
def test_what_stays_whole_is_said(name: str) -> None:
    """One note each, and nothing worse, in both modes."""
    base, tower, others = PARTS[name]
    model = meta(name)
    for sequence_parallel in (False, True):
        found = check_plan(OURS, model, "dp=2,tp=2", sequence_parallel=sequence_parallel)
        assert {finding.severity for finding in found} == {Severity.NOTE}
        whole = {f.subject: f.message for f in found if f.code == "SP211"}
        assert set(whole) == {".".join(tower.split(".")[: 1 if name == "llama4" else 2]), *others}
        for subject, message in whole.items():
            assert message.startswith(f"{subject} stays whole on purpose, beside the language model {base}: ")


def test_what_transformers_would_cut_of_a_tower_is_said_too() -> None:
    found = check_plan(OURS, meta("llama4"), "dp=2,tp=2")
    said = [finding.message.partition("rank")[2] for finding in found if finding.code == "SP211"]
    assert said == [
        "; of transformers' own plan 7 keys for it are left out",
        "; of transformers' own plan 1 key for it is left out",
    ]


def test_a_tower_of_which_the_user_speaks_is_not_spoken_of(tmp_path: Path) -> None:
    model = meta("llava")
    rules = {"model.vision_tower": None, "model.multi_modal_projector": None}
    assert check_plan([OURS, rules], model, "dp=2,tp=2") == ()
    assert check_plan("gemma3", meta("gemma3-vision"), "dp=2,tp=2") == ()


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_the_command_line_lets_it_pass(name: str, tmp_path: Path) -> None:
    model = SEEING[name]
    config = model.config()
    config.architectures = [model.model_class.__name__]
    config.save_pretrained(tmp_path)
    plan = tmp_path / "plan.yaml"
    plan.write_text("format: 1\nextends: hf\n")
    arguments = ["--check", str(plan), "--model", str(tmp_path), "--mesh", "dp=2,tp=2", "--strict"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "note SP211" in result.output


@pytest.mark.parametrize(
    ("name", "mesh", "sequence_parallel"),
    [
        ("gemma3-vision", "dp=1,tp=2", True),
        ("qwen2.5-vl", "dp=2,tp=2", False),
        ("qwen2.5-vl", "dp=1,tp=2", True),
        ("llava", "dp=1,tp=2", False),
        ("llava", "dp=2,tp=2", True),
    ],
)
def test_parity_with_images(pool: Pool, name: str, mesh: str, sequence_parallel: bool) -> None:
    """Images in every micro-batch, and one batch without: what sees then has no gradient on either side."""
    case = Case(name, mesh, sequence_parallel, plan=OURS, images=True, training=mesh == "dp=2,tp=2")
    batches = [Batch(image=True, mask=True), Batch(length=9, image=True), Batch()]
    assert pool.run(case.world_size, parity.compare, case, batches, shared=True) == [[]] * case.world_size


def test_one_of_them_does_not_run_in_transformers() -> None:
    """transformers 5.24: its language model's output lacks a field that the class around it reads, image or none."""
    model: nn.Module = tiny_models.build("llama4")
    inputs, _ = parity.make_inputs(Batch())
    with pytest.raises(AttributeError, match="image_outputs"):
        model(**inputs)
