"""The reference models are the published ones: their exact parameter counts say so."""

import json
import math
import time
from collections import Counter

import pytest
from click.testing import CliRunner
from torch import nn
from transformers import AutoConfig, BambaConfig, NemotronHConfig

import tiny_models
from shardplan.checks.names import with_article
from shardplan.cli import command
from shardplan.diagnostics import PlanError
from shardplan.references import build_meta_model, load_config, reference_models

# name: (exact count, tied parameters once; the size as published, in billions, with the digits that were published)
PARAMETERS = {
    "gemma-3-1b": (999_885_952, "1.00"),
    "gemma-3-4b": (4_300_079_472, "4.3"),
    "gemma-3-27b": (27_432_406_640, "27.4"),
    "gpt2": (124_439_808, "0.1244"),
    "gpt2-xl": (1_557_611_200, "1.558"),
    "llama-3.1-8b": (8_030_261_248, "8.03"),
    "llama-3.1-70b": (70_553_706_496, "70.6"),
    "llama-3.1-405b": (405_853_388_800, "406"),
    "llama-3.2-1b": (1_235_814_400, "1.24"),
    "mistral-7b": (7_241_732_096, "7.24"),
    "nemotron-h-8b": (8_100_852_736, "8.1"),
    "nemotron-nano-9b-v2": (8_888_227_328, "8.89"),
    "nemotron-3-nano-30b-a3b": (31_577_937_344, "31.6"),
    "phi-3-mini": (3_821_079_552, "3.82"),
    "phi-4": (14_659_507_200, "14.66"),
    "qwen2.5-0.5b": (494_032_768, "0.49"),
    "qwen2.5-7b": (7_615_616_512, "7.6"),
    "qwen2.5-72b": (72_706_203_648, "72.7"),
    "qwen3-0.6b": (596_049_920, "0.6"),
    "qwen3-8b": (8_190_735_360, "8.2"),
    "qwen3-32b": (32_762_123_264, "32.8"),
}


def code_and_text(spec: str) -> tuple[str, str]:
    with pytest.raises(PlanError) as caught:
        build_meta_model(spec)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic.code, str(diagnostic)


def test_every_reference_model_has_its_count_pinned() -> None:
    assert set(reference_models()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    exact, published = PARAMETERS[name]
    model = build_meta_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == exact
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    decimals = len(published.partition(".")[2])
    assert f"{exact / 1e9:.{decimals}f}" == published


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_model_is_the_class_that_the_config_names_and_the_file_names_its_source(name: str) -> None:
    values = json.loads(reference_models()[name].read_text(encoding="utf-8"))
    assert type(build_meta_model(name)).__name__ == values["architectures"][0]
    assert values["_source"].startswith("config.json of ")


def test_tied_models_share_one_parameter() -> None:
    model = build_meta_model("llama-3.2-1b")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("nemotron-h-8b", {"linear_attention": 24, "mlp": 24, "full_attention": 4}),
        ("nemotron-nano-9b-v2", {"linear_attention": 27, "mlp": 25, "full_attention": 4}),
        ("nemotron-3-nano-30b-a3b", {"linear_attention": 23, "moe": 23, "full_attention": 6}),
    ],
)
def test_hybrid_models_have_the_published_number_of_each_kind_of_block(name: str, blocks: dict[str, int]) -> None:
    assert Counter(load_config(name).layers_block_type) == blocks


def test_the_largest_model_builds_in_time() -> None:
    build_meta_model("llama-3.2-1b")  # the imports, which the budget does not count
    start = time.process_time()
    build_meta_model("llama-3.1-405b")
    assert time.process_time() - start < 1.0


def test_a_config_file_and_its_folder_name_the_same_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text(reference_models()["llama-3.2-1b"].read_text(encoding="utf-8"))
    for spec in (str(tmp_path), str(tmp_path / "config.json")):
        assert sum(parameter.numel() for parameter in build_meta_model(spec).parameters()) == 1_235_814_400
    assert load_config(tmp_path).num_hidden_layers == load_config("llama-3.2-1b").num_hidden_layers == 16


def test_without_architectures_the_causal_language_model_is_built(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    assert type(build_meta_model(str(tmp_path))).__name__ == "LlamaForCausalLM"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)


def needs_a_size(size: int) -> nn.Module:
    return nn.Linear(size, size)


def makes_a_number() -> int:
    return 3


def test_a_class_of_ones_own_is_built_on_the_meta_device() -> None:
    model = build_meta_model("test_references:Tiny")
    assert type(model).__name__ == "Tiny"
    assert model.linear.weight.is_meta


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("llama-3.1-7b", "did you mean llama-3.1-70b or llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "did you mean llama-3.1-8b"),
        ("something else", "the reference models are gemma-3-1b, "),
        ("no_such_module:Class", "cannot import 'no_such_module'"),
        (":Class", "cannot import ''"),
        ("test_references:Tinny", "did you mean 'Tiny'?"),
        ("test_references:needs_a_size", "cannot be called without arguments: missing a required argument: 'size'"),
        ("test_references:PARAMETERS", "cannot be called without arguments"),
        ("test_references:makes_a_number", "'test_references:makes_a_number' makes an int"),
    ],
)
def test_a_model_that_cannot_be_found_or_built_is_refused_with_the_way_out(spec: str, said: str) -> None:
    code, text = code_and_text(spec)
    assert code == "SP901"
    assert said in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list\n    expected: the config.json of a transformers model, an object"),
        ("3", "holds a number"),
        ("{}", "has no model_type"),
        ('{"model_type": "lama"}', "knows no model_type 'lama'"),
        ('{"model_type": "lama"}', "did you mean 'llama'? Otherwise install"),
        ('{"model_type": "no-such-type"}', "knows no model_type 'no-such-type'"),
        ('{"model_type": ["llama"]}', "knows no model_type '['llama']'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers refuses"),
        ('{"model_type": "llama", "architectures": ["OtherForCausalLM"]}', "has no class OtherForCausalLM"),
        ('{"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}}', "never run"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(tmp_path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    code, text = code_and_text(str(tmp_path))
    assert code == "SP901"
    assert said in text


def test_an_unknown_type_is_not_answered_with_all_that_are_known(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    assert len(code_and_text(str(tmp_path))[1]) < 400


@pytest.mark.parametrize(("noun", "said"), [("int", "an int"), ("Embedding", "an Embedding"), ("str", "a str")])
def test_the_article_goes_by_the_first_letter(noun: str, said: str) -> None:
    assert with_article(noun) == said


def test_a_folder_without_a_config_is_refused(tmp_path) -> None:
    assert "holds no config.json" in code_and_text(str(tmp_path))[1]


HYBRIDS = {
    "nemotron_h": NemotronHConfig(**tiny_models.NEMOTRON_H),
    "bamba": BambaConfig(hidden_size=32, num_hidden_layers=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_floats_that_json_has_no_number_for_are_read_as_transformers_saves_them(tmp_path, name: str) -> None:
    """A Mamba-2 mixer's time_step_limit is (0, inf) by default."""
    HYBRIDS[name].save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    loaded = load_config(tmp_path)
    assert tuple(loaded.time_step_limit) == (0.0, math.inf)
    assert loaded == AutoConfig.from_pretrained(tmp_path)


def test_the_plan_of_a_saved_hybrid_can_be_checked(tmp_path) -> None:
    HYBRIDS["nemotron_h"].save_pretrained(tmp_path)
    run = CliRunner().invoke(command, ["--check", "nemotron_h", "--model", str(tmp_path), "--mesh", "tp=2"])
    assert (run.exit_code, run.output) == (0, "")


def test_tagged_floats_are_read_however_deep_and_nothing_else_is(tmp_path) -> None:
    written = {
        "deep": {"list": [{"low": {"__float__": "-Infinity"}}], "nan": {"__float__": "NaN"}},
        "others": [{"__float__": "1.5"}, {"__float__": 1.5}, {"__float__": "NaN", "and": 1}],
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **written}))
    loaded = load_config(tmp_path)
    assert loaded.deep["list"] == [{"low": -math.inf}]
    assert math.isnan(loaded.deep["nan"])
    assert loaded.others == written["others"]
