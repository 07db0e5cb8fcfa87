"""Parameters and modules beside the cut linears: what covers a part only, what would be counted tp times, or once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hf_models
import tiny_models
from golden import ROOT
from shardplan import check_plan
from shardplan.diagnostics import Diagnostic, Location, Severity
from shardplan.merge import HF
from shardplan.plan import Plan

OVER_HF = Plan(HF, Location(HF), over_hf=True)


def overlaid(plan: Any, model: nn.Module, rules: dict[str, Any]) -> list[Diagnostic]:
    layers: list[Any] = [plan, rules]
    found = check_plan(layers, model, "tp=2")
    return [finding for finding in found if finding.severity is Severity.ERROR]


def shipped(model: str) -> Path:
    return ROOT / "plans" / f"{model}.yaml"


HANDED_ON = "its output is handed on inside the block, and does not go into the sum at its end"
CUT_BELOW = "model.layers.*.mlp.up_proj below it is cut: its output is a part of a sum already"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({".mlp.act_fn": "counted_once"}, HANDED_ON),
        ({".mlp": "counted_once", ".mlp.up_proj": "colwise"}, CUT_BELOW),
    ],
)
def test_only_experts_are_counted_once(rules: dict[str, str], said: str) -> None:
    written = {f"model.layers.*{name}": style for name, style in rules.items()}
    found = overlaid(shipped("llama"), tiny_models.build_meta("llama"), written)
    assert any(finding.code == "SP105" and said in finding.message for finding in found)


@pytest.mark.parametrize("sections", [["a: 1", "b: 1"], ["a: 3", "b: 1"]])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_a_projection_of_heads_packs_nothing(projection: str, sections: list[str], tmp_path: Path) -> None:
    overlay = tmp_path / "plan.yaml"
    rule = f"{{style: colwise, sections: [{', '.join(sections)}]}}"
    overlay.write_text(f"format: 1\nrules:\n  .layers.*.self_attn.{projection}: {rule}\n")
    found = check_plan([shipped("llama"), overlay], tiny_models.build_meta("llama"), "tp=2")
    assert [(finding.code, finding.severity) for finding in found] == [("SP214", Severity.ERROR)]


def test_the_first_bias_of_cut_experts_is_cut() -> None:
    bias = "model.layers.*.mlp.experts.gate_up_proj_bias"
    (found,) = overlaid(OVER_HF, hf_models.build_meta("gpt-oss"), {bias: None})
    said = f"{bias} is whole on every rank, where gate_up_proj gives each a part of the features"
    assert (found.code, found.message) == ("SP105", said)


@pytest.mark.parametrize(
    ("style", "refused"), [(None, True), ("replicated_with_grad_allreduce", True), ("added_once", False)]
)
def test_the_last_bias_of_cut_experts_is_added_once(style: str | None, refused: bool) -> None:
    bias = "model.layers.*.mlp.experts.down_proj_bias"
    found = overlaid(OVER_HF, hf_models.build_meta("gpt-oss"), {bias: style})
    said = f"{bias} is whole on every rank, and each adds all of it to its part of what the experts give"
    assert [(finding.code, finding.message) for finding in found] == ([("SP105", said)] if refused else [])


def test_local_sizes_do_not_count_what_every_rank_has() -> None:
    rule = {"style": "replicated_with_grad_allreduce", "local_sizes": ["top_k"]}
    found = overlaid(OVER_HF, hf_models.build_meta("llama4"), {"model.layers.*.feed_forward.router": rule})
    assert [finding.message for finding in found if finding.code == "SP214"] == [
        "top_k of model.layers.*.feed_forward.router counts what every rank has all of"
    ]


def test_experts_are_cut_along_the_features_between_their_projections() -> None:
    experts = "model.layers.*.mlp.experts"
    rules = {
        f"{experts}.gate_up_proj": {"style": "shard", "dim": 2},
        f"{experts}.down_proj": {"style": "shard", "dim": 1},
    }
    messages = [finding.message for finding in overlaid(OVER_HF, hf_models.build_meta("deepseek-v4"), rules)]
    assert messages == [
        f"style shard on {experts}.{name}_proj: an expert {does} its features along dim {right}, "
        f"and dim {wrong} is that of the stream"
        for name, does, right, wrong in (("gate_up", "gives", 1, 2), ("down", "takes", 2, 1))
    ]


class NormsItsSum(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.post_norm = LlamaRMSNorm(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.post_norm(super().forward(x))
        return normed


def test_a_norm_behind_the_last_linear_of_a_block_would_norm_a_part() -> None:
    model = tiny_models.build_meta("llama")
    assert isinstance(model, LlamaForCausalLM)
    with torch.device("meta"):
        for layer in model.model.layers:
            layer.mlp = NormsItsSum(model.config)
    rules = {"model.layers.*.mlp.post_norm": "replicated_with_grad_allreduce"}
    (finding,) = overlaid(shipped("llama"), model, rules)
    assert finding.code == "SP208"
    assert "stands behind down_proj inside block model.layers.*.mlp: it would norm a part of a sum" in finding.message


@pytest.mark.parametrize(
    ("plan", "model", "name"),
    [
        ("llama", "llama", ".norm"),
        ("llama", "llama", ".layers.*.input_layernorm.weight"),
        ("qwen2", "qwen3", ".layers.*.self_attn.{q,k}_norm"),
        ("nemotron_h", "nemotron-h", ".layers.*.mixer.gate?"),
    ],
)
def test_what_goes_into_no_sum_is_not_added_once(tmp_path: Path, plan: str, model: str, name: str) -> None:
    overlay = tmp_path / "plan.yaml"
    overlay.write_text(f"format: 1\nrules:\n  '{name}': added_once\n")
    found = check_plan([shipped(plan), overlay], tiny_models.build_meta(model), "tp=2")
    assert {f.code for f in found if f.severity is Severity.ERROR} == {"SP105"}
    assert all("nothing adds it to a part of a sum" in f.message for f in found if f.code == "SP105")


class Indexer(nn.Module):
    """As beside latent attention: a projection of its own, whole on every rank, and a norm over what that gives."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.wk = nn.Linear(hidden, width, bias=False)
        self.k_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.k_norm(self.wk(x))


@pytest.mark.parametrize(("style", "codes"), [("null", set()), ("colwise", {"SP208"})])
def test_a_norm_behind_a_whole_linear_is_whole(tmp_path: Path, style: str, codes: set[str]) -> None:
    """Though a cut projection of the attention around it is just as wide."""
    model: Any = tiny_models.build_meta("llama")
    width = model.model.layers[0].self_attn.k_proj.out_features
    for layer in model.model.layers:
        with torch.device("meta"):
            layer.self_attn.indexer = Indexer(model.config.hidden_size, width)
    overlay = tmp_path / "plan.yaml"
    indexer = ".layers.*.self_attn.indexer"
    overlay.write_text(f"format: 1\nrules:\n  {indexer}.wk: {style}\n  {indexer}.k_norm: null\n")
    found = check_plan([shipped("llama"), overlay], model, "tp=2")
    assert {f.code for f in found if f.severity is Severity.ERROR and "k_norm" in f.message} == codes


class Scaled(nn.Module):
    """An MLP with two vectors of its own, as long as each other and as nothing else."""

    def __init__(self, mlp: LlamaMLP) -> None:
        super().__init__()
        self.mlp = mlp
        self.scale, self.shift = (nn.Parameter(torch.ones(24, device="meta")) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale.mean() + self.shift.mean()


@pytest.mark.parametrize("cut", [("scale",), ("scale", "shift")])
def test_a_parameter_is_not_cut_by_itself(tmp_path: Path, cut: tuple[str, ...]) -> None:
    """Of two vectors as long as each other, neither gives what the other takes."""
    model: Any = tiny_models.build_meta("llama")
    for layer in model.model.layers:
        layer.mlp = Scaled(layer.mlp)
    own = "\n".join(f"  .layers.*.mlp.{name}: {{style: shard, dim: 0}}" for name in cut)
    overlay = tmp_path / "plan.yaml"
    overlay.write_text(
        "format: 1\nrules:\n  .layers.*.mlp.mlp.{gate,up}_proj: colwise\n  .layers.*.mlp.mlp.down_proj: rowwise\n"
        f"{own}\n"
    )
    found = check_plan([shipped("llama"), overlay], model, "tp=2")
    said = [f for f in found if f.severity is Severity.ERROR and "nothing else in" in f.message]
    assert len(said) == len(cut)
