"""The stand-ins of the fused kernels compute what transformers' own code does, and where upstream they differ."""

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from transformers.models.nemotron_h import modeling_nemotron_h

import mamba_kernels
import parity
import tolerances
from parity import Batch
from pool import Pool, build_mesh
from tiny_models import OTHERS, build

pytestmark = pytest.mark.processes  # not quick

HYBRIDS = [name for name in OTHERS if name.startswith("nemotron-h")]
MIXERS = 2  # of every hybrid
FUSED = {"mamba_split_conv1d_scan_combined": MIXERS}
UNFUSED = {"causal_conv1d_fn": MIXERS, "mamba_chunk_scan_combined": MIXERS}


def both(
    name: str, batch: Batch, mask: Tensor | None = None, train: bool = True
) -> tuple[list[Tensor], list[nn.Module]]:
    """Logits where ``mask`` is one, and models with gradients: of transformers' own code, then of the kernels."""
    inputs, targets = parity.make_inputs(batch)
    kept = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    if mask is not None:
        inputs["attention_mask"] = mask
    targets = targets.masked_fill(~kept, -100)
    models = [build(name).train(train), build(name).train(train)]
    logits = [parity.step(models[0], inputs, targets).logits[kept]]
    with mamba_kernels.installed() as calls:
        logits.append(parity.step(models[1], inputs, targets).logits[kept])
    assert calls == (FUSED if train else UNFUSED)
    return logits, models


def forward(model: nn.Module) -> None:
    """As in training: with a cache, the default, no mixer takes the fused path."""
    model(**parity.make_inputs(Batch())[0], use_cache=False)


def difference(logits: list[Tensor]) -> float:
    return (logits[0] - logits[1]).abs().max().item()


def padding(length: int, side: str) -> Tensor:
    """Every other row holds a third of the tokens."""
    mask = torch.ones(parity.ROWS, length, dtype=torch.long)
    mask[::2, -(-length // 3) :] = 0
    return mask if side == "right" else mask.flip(1)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("length", [16, 7, 5, 1])
def test_the_kernels_compute_what_transformers_does(name: str, train: bool, length: int) -> None:
    logits, models = both(name, Batch(length), train=train)
    assert difference(logits) <= tolerances.LOGITS
    assert list(parity.same_gradients(*models)) == []


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(("side", "train"), [("right", True), ("right", False), ("left", False)])
def test_with_padding_too_where_tokens_are_read(name: str, side: str, train: bool) -> None:
    logits, models = both(name, Batch(16), padding(16, side), train)
    assert difference(logits) <= tolerances.LOGITS
    assert list(parity.same_gradients(*models)) == []


def test_padding_before_tokens_leaks_into_them_on_the_fused_path_upstream() -> None:
    """transformers 5.24 masks what goes into ``in_proj`` on both paths, but only its own code masks the convolution's
    output, too, where the bias has made something of nothing. When this fails, upstream has changed."""
    logits, _ = both("nemotron-h", Batch(16), padding(16, "left"))
    assert difference(logits) > 100 * tolerances.LOGITS


def test_the_fused_path_calls_no_child_but_in_proj() -> None:
    """What a plan has to reckon with: no hook of ``out_proj`` ever runs."""
    called: set[str] = set()
    model = build("nemotron-h")
    for child, module in model.model.layers[0].mixer.named_children():
        module.register_forward_hook(lambda *_, child=child: called.add(child))
    with mamba_kernels.installed():
        forward(model)
    assert called == {"in_proj"}
    called.clear()
    forward(model)
    assert called == {"in_proj", "norm", "out_proj"}


def test_everything_is_as_before_afterwards_even_after_an_error() -> None:
    before = dict(vars(modeling_nemotron_h))
    entered = mamba_kernels.installed()
    entered.__enter__()
    assert vars(modeling_nemotron_h) != before
    assert not entered.__exit__(RuntimeError, RuntimeError("on purpose"), None)
    assert vars(modeling_nemotron_h) == before
    assert not {"mamba_ssm", "causal_conv1d"} & set(sys.modules)


def test_a_head_dim_that_does_not_go_with_the_tensors_is_refused() -> None:
    model = build("nemotron-h")
    model.model.layers[0].mixer.head_dim = 4
    with mamba_kernels.installed(), pytest.raises(AssertionError, match="does not go with heads and groups"):
        forward(model)


def test_a_wrong_number_of_groups_goes_unnoticed_on_the_fused_path_alone() -> None:
    """As upstream: the state size is what is left when the width is divided by the groups. A mixer whose weights are
    sharded needs its ``n_groups`` adapted, or it silently computes something else."""
    model = build("nemotron-h")
    model.model.layers[0].mixer.n_groups = 2
    with mamba_kernels.installed():
        forward(model)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        forward(model)


def refusal_of_a_dtensor() -> str:
    mesh = build_mesh("tp=1")
    model = build("nemotron-h")
    mixer = model.model.layers[0].mixer
    mixer.D = nn.Parameter(distribute_tensor(mixer.D.detach(), mesh))
    with mamba_kernels.installed(), pytest.raises(TypeError) as refused:
        forward(model)
    return str(refused.value)


def test_a_dtensor_is_refused(pool: Pool) -> None:
    (said,) = pool.run(1, refusal_of_a_dtensor)
    assert said == "mamba_split_conv1d_scan_combined reads memory by its address: no DTensor"
