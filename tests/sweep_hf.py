"""transformers' own tensor parallelism on the models of the sweep: loaded in two ranks as its users load it.

A small model is saved to a folder and comes back by ``from_pretrained(folder, distributed_config=...)``. It is compared
with the same folder loaded whole, as the proof compares: logits and every gradient of one micro-batch, then
the gradients of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.checks.names import general
from shardplan.hf.styles import HF_STYLES, Meaning
from shardplan.inventory import Inventory, ModuleInfo, ParameterInfo
from shardplan.verify.batches import ROWS
from shardplan.verify.compare import FLOOR, GRADIENT, LENGTHS, LOGITS
from shardplan.verify.ranks import Ranks, RanksFailedError
from shardplan.verify.rounding import Rounding
from shardplan.verify.shrink import shrink
from shardplan.verify.weights import randomise
from sweep_rows import EXACT

# What is told of several, first to last.
KINDS = ("not saved", "crash", "wrong logits", "wrong gradients at once", "wrong gradients from the second micro-batch")
SEED, RANKS = 7, 2
SECONDS = 90.0  # until ranks of which one waits for another count as hanging


def verdict(ranks: Ranks, model: nn.Module) -> str:
    """``exact``, or one of `KINDS` with what was seen first.

    Args:
        ranks: at least two.
        model: at its real size, on the meta device.

    Raises:
        PlanError: SP903, the model cannot be made small.
    """
    build = shrink(model, RANKS, RANKS)
    with TemporaryDirectory(prefix="sweep-") as folder:
        try:
            found = ranks.run(compare, build, folder, size=2, timeout=SECONDS)
        except RanksFailedError as failed:
            found = [f"crash: {failed}"]
    wrong = [said for said in found if said]
    return min(wrong, key=lambda said: KINDS.index(said.partition(":")[0])) if wrong else EXACT


def share(inventory: Inventory) -> float:
    """Percent of the parameters beside embedding and head that transformers' plan cuts, at the model's real size."""
    ends = (inventory.embedding, inventory.head)
    body = [(module, p) for module in inventory.modules if module.fqn not in ends for p in module.parameters]
    whole = sum(parameter.numel for _, parameter in body)
    cut = sum(parameter.numel for module, parameter in body if _is_cut(inventory, module, parameter))
    return round(100 * cut / whole, 1) if whole else 0.0


_CUT = {
    Meaning.CUT_OUTPUT,
    Meaning.CUT_INPUT,
    Meaning.GATHERED_OUTPUT,
    Meaning.SCATTERED_INPUT,
    Meaning.PACKED_OUTPUT,
    Meaning.PACKED_LAST,
    Meaning.CUT_ROWS,
    Meaning.CUT_COLUMNS,
}


def _is_cut(inventory: Inventory, module: ModuleInfo, parameter: ParameterInfo) -> bool:
    """A parameter goes by its own key, else by its module's; a row-wise linear's bias stays whole."""
    plan = dict(inventory.tp_plan)
    style = plan.get(general(parameter.fqn)) or plan.get(general(module.fqn))
    meaning = HF_STYLES[style].meaning if style in HF_STYLES else None
    by_rows = meaning in (Meaning.CUT_INPUT, Meaning.SCATTERED_INPUT)
    return meaning in _CUT and not (by_rows and parameter.name == "bias")


# ---------------------------------------------------------------- on every rank


def compare(build: Callable[[], nn.Module], folder: str) -> str:
    """What goes wrong first on this rank; "" where nothing does."""
    try:
        _save(build, folder)
    except Exception as error:  # noqa: BLE001 - any model's code: the verdict is that it raises
        return f"not saved: {_line(error)}"
    try:
        found = list(_faults(build, folder))  # all of them: the other rank may see none, and gathers as often
        return found[0] if found else ""
    except Exception as error:  # noqa: BLE001 - likewise
        return f"crash: {_line(error)}"


def _save(build: Callable[[], nn.Module], folder: str) -> None:
    """By one rank; the others wait, also for one that failed."""
    failed: list[Exception] = []
    if dist.get_rank() == 0:
        try:
            torch.manual_seed(SEED)
            model: Any = build()
            randomise(model, SEED)
            model.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failed.append(error)
    told: list[Any] = [bool(failed)]
    dist.broadcast_object_list(told)
    if failed:
        raise failed[0]
    if told[0]:
        raise RuntimeError("the first rank could not save it")


def _faults(build: Any, folder: str) -> Iterator[str]:
    """What is wrong, in the order of `KINDS`."""
    from transformers.distributed.configuration_utils import DistributedConfig

    def whole() -> Any:
        return build.model_class.from_pretrained(folder, dtype=torch.float32).train()

    reference, world_size = whole(), dist.get_world_size()
    sharded = build.model_class.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=world_size)
    ).train()
    expected, actual = _one(reference), _one(sharded)
    difference, allowed = (expected - actual).abs().max().item(), LOGITS * max(1.0, expected.abs().max().item())
    rounding = Rounding(whole, lambda model: {"logits": _one(model)})
    if not difference <= allowed and not rounding.explains_largest("logits", difference):
        yield f"wrong logits: off by {difference:.1e} where {allowed:.1e} is rounding"
    faults = _gradients(reference, sharded, Rounding(whole, partial(_gradients_of, _one)))
    yield from (f"wrong gradients at once: {fault}" for fault in faults)
    for model in (reference, sharded):
        model.zero_grad()
        _two(model)
    faults = _gradients(reference, sharded, Rounding(whole, partial(_gradients_of, _two)))
    yield from (f"wrong gradients from the second micro-batch: {fault}" for fault in faults)


def _one(model: nn.Module) -> Tensor:
    return _step(model, LENGTHS[0], 1.0)


def _two(model: nn.Module) -> None:
    for length in LENGTHS:
        _step(model, length, 1 / len(LENGTHS))


def _step(model: Any, length: int, weight: float) -> Tensor:
    """Forward and backward of a batch, the same for every model; the logits."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1000 * SEED + length)
    ids, targets = (torch.randint(0, vocabulary, (ROWS, length), generator=generator) for _ in range(2))
    logits = _whole(model(input_ids=ids, use_cache=False).logits)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss * weight).backward()
    return logits.detach()


def _gradients_of(step: Callable[[nn.Module], object], model: nn.Module) -> dict[str, Tensor]:
    step(model)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _gradients(reference: nn.Module, sharded: nn.Module, rounding: Rounding) -> Iterator[str]:
    """From the loss backwards."""
    given = {name: parameter.grad for name, parameter in sharded.named_parameters()}
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    total = sqrt(sum(gradient.norm().item() ** 2 for gradient in wanted.values()))
    for name, expected in reversed(list(wanted.items())):
        gradient, size = given.get(name), expected.norm().item()
        if gradient is None:
            yield f"{general(name)} has none"
            continue
        difference = (_whole(gradient) - expected).norm().item()
        if not difference <= GRADIENT * size + FLOOR * total and not rounding.explains_norm(name, difference):
            yield f"{general(name)} is off by {100 * difference / (size + 1e-30):.2g} % of its norm"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
