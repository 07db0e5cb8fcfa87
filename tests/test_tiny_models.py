"""The tiny models that the parity suite does not build: each runs as the suite would call it, the same way twice."""

import pytest
import torch
from torch import Tensor

import parity
from pairs import pairwise
from parity import Batch
from tiny_models import OTHERS, build, build_meta

pytestmark = pytest.mark.processes  # not quick

BATCHES = [
    Batch(labels=settings["length"] > 1, **settings)
    for settings in pairwise(
        length=[16, 7, 5, 1],
        attention=["sdpa", "eager"],
        mask=[False, True],
        positions=["absent", "given", "restarting"],
    )
]
HYBRIDS = [name for name in OTHERS if name.startswith("nemotron-h")]


@pytest.mark.parametrize("name", OTHERS)
def test_it_runs_on_every_batch_the_same_way_twice(name: str) -> None:
    model, again = build(name), build(name)
    for batch in BATCHES:
        inputs, targets = parity.make_inputs(batch, vocabulary=model.config.vocab_size)
        outputs = []
        for each in (model, again):
            each.set_attn_implementation(batch.attention)
            each.zero_grad()
            outputs.append(parity.step(each, inputs, targets))
        assert torch.equal(outputs[0].logits, outputs[1].logits)
        assert outputs[0].logits.isfinite().all()
        for (parameter_name, parameter), twin in zip(model.named_parameters(), again.parameters(), strict=True):
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
            assert torch.equal(parameter.grad, twin.grad), parameter_name


@pytest.mark.parametrize("name", OTHERS)
def test_no_parameter_is_left_out_or_at_its_default(name: str) -> None:
    """Every gradient is far above the floor below which parity does not look; no norm is one, no bias zero."""
    model = build(name)
    parity.step(model, *parity.make_inputs(Batch(length=16), vocabulary=model.config.vocab_size))
    norms = {name: parameter.grad.norm() for name, parameter in model.named_parameters()}
    total = torch.stack(list(norms.values())).norm()
    assert [name for name, norm in norms.items() if norm < 1e-6 * total] == []
    one_dimensional = {name: tensor for name, tensor in model.named_parameters() if tensor.ndim == 1}
    one_dimensional.update({name: b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")})
    assert [name for name, tensor in one_dimensional.items() if tensor.unique().numel() < tensor.numel() / 2] == []


@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_are_spread_over_the_experts_and_none_is_on_the_edge(name: str) -> None:
    """A choice between two experts that rounding could turn would make parity a matter of luck."""
    model = build(name)
    margins: list[Tensor] = []
    chosen: set[int] = set()

    def watch(module: torch.nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        scores = output[0].sigmoid() + module.e_score_correction_bias
        best = scores.sort(dim=-1, descending=True).values
        margins.append((best[:, :-1] - best[:, 1:]).min())
        chosen.update(output[2].flatten().tolist())

    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(watch)
    for seed, batch in enumerate(BATCHES):
        model(**parity.make_inputs(batch, seed)[0])
    assert chosen == set(range(model.config.n_routed_experts))
    assert min(margins) > 1e-6


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_has_all_four_kinds_of_block(name: str) -> None:
    kinds = {type(module).__name__ for module in build_meta(name).modules()}
    assert kinds >= {"NemotronHMamba2Mixer", "NemotronHAttention", "NemotronHMLP", "NemotronHMoE"}


def test_the_code_from_the_hub_has_a_backbone_and_computes_the_same() -> None:
    own, native = build("nemotron-h-backbone"), build("nemotron-h")
    assert [name for name, _ in own.named_children()] == ["backbone", "lm_head"]
    assert [name for name, _ in own.backbone.named_children()] == ["embeddings", "layers", "norm_f"]
    names = {name.replace("backbone.", "model.", 1) for name in own.state_dict()}
    assert names == set(native.state_dict())
    inputs, _ = parity.make_inputs(Batch(mask=True, positions="given", labels=True))
    expected, actual = native(**inputs), own(**inputs)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(actual.loss, expected.loss)
