"""What each rank does for a proof: the sharded model against the unsharded one, under the parity contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from shardplan.apply import apply
from shardplan.inventory import take_inventory
from shardplan.loss import cross_entropy
from shardplan.lower import lower
from shardplan.mesh import MeshSpec
from shardplan.plan import Plan
from shardplan.resolve import resolve
from shardplan.styles import Style
from shardplan.verify.activations import first_difference
from shardplan.verify.batches import Batches, whole
from shardplan.verify.distances import distances
from shardplan.verify.replicas import unequal_replicas
from shardplan.verify.rounding import Rounding
from shardplan.verify.trail import Trail
from shardplan.verify.weights import randomise
from shardplan.weights import stored_parameters

# The contract, in fp32 on gloo.
LOGITS = 1e-5  # largest absolute difference, beside the same share of the largest logit
LOSS = 1e-5  # relative
GRADIENT = 1e-4  # |difference| <= GRADIENT |gradient| + FLOOR |all gradients|: some true gradients are ~1e-10
FLOOR = 1e-7
NORM = 1e-5  # relative, of the gradient norm
PARAMETER, PARAMETER_LR = 1e-4, 0.01  # |difference| <= PARAMETER |p| + PARAMETER_LR lr sqrt(numel), after AdamW steps
LR, CLIP = 1e-3, 0.1
LENGTHS = (16, 5)  # of the micro-batches: one that tp divides, one that it does not
LONGER = 64  # of a forward in evaluation mode
ALL_LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Proof:
    """What is to be proven, the same on every rank.

    Attributes:
        build: gives the unsharded model; a function of a module, or a picklable object.
        plan, styles: what is applied.
        mesh: of as many ranks as there are processes.
    """

    build: Callable[[], nn.Module]
    plan: Plan
    styles: Mapping[str, Style]
    mesh: MeshSpec
    sequence_parallel: bool
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Deviation:
    """One thing that is not as in the unsharded model.

    Attributes:
        what: ``crash``, ``activation``, ``logits``, ``loss``, ``gradient``, ``replicas``, ``norm``, ``parameter``,
            ``names``.
        subject: the parameter or module; "" where it is the model as a whole.
        text: by how much, or the error.
        when: the step of the proof.
    """

    what: str
    subject: str
    text: str
    when: str


def compare(proof: Proof) -> list[Deviation]:
    """Everything that deviates on this rank; empty when all holds. What the model raises is a deviation, too."""
    trail = Trail()
    try:
        return list(_steps(proof, trail))
    except Exception as error:  # noqa: BLE001 - any code of any model under any plan: the finding is that it raises
        message = str(error).splitlines()[0] if str(error) else ""
        return [Deviation("crash", trail.module, f"{type(error).__name__}: {message}", trail.step)]


def _steps(proof: Proof, trail: Trail) -> Iterator[Deviation]:
    reference, sharded = _built(proof), _built(proof)
    names, sizes = zip(*proof.mesh.axes, strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    trail.step = "applying the plan"
    resolved = resolve(proof.plan, take_inventory(sharded), proof.styles)
    compiled = lower(resolved, proof.mesh, sequence_parallel=proof.sequence_parallel)
    apply(sharded, compiled, mesh)
    yield from _names(reference, sharded)
    trail.follow(sharded)
    told = frozenset(module.fqn for module in compiled.modules if module.block is None)
    pair = _Pair(partial(_built, proof), reference, sharded, mesh, proof.seed, told)
    for number, length in enumerate(LENGTHS):
        for masked in (False, True) if length > 1 and number == 0 else (False,):
            trail.step = f"a sequence of {length}{' with padding' if masked else ''}"
            found = list(pair.one_batch(length, masked))
            yield from (replace(deviation, when=trail.step) for deviation in found)
            if any(deviation.what == "logits" for deviation in found):
                return
    trail.step = f"an evaluation of {LONGER} tokens"
    yield from (replace(deviation, when=trail.step) for deviation in pair.evaluation())
    trail.step = "two micro-batches"
    yield from (replace(deviation, when=trail.step) for deviation in pair.accumulation())
    trail.step = "three AdamW steps"
    yield from (replace(deviation, when=trail.step) for deviation in pair.training())


def _built(proof: Proof) -> nn.Module:
    torch.manual_seed(proof.seed)
    model = proof.build()
    randomise(model, proof.seed)
    return model.train()


class _Pair:
    """The two models, and what is compared between them."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        reference: nn.Module,
        sharded: nn.Module,
        mesh: DeviceMesh,
        seed: int,
        told: frozenset[str],
    ) -> None:
        self.build, self.reference, self.sharded, self.told = build, reference, sharded, told
        config: Any = reference.config
        self.batches = Batches(mesh, seed, config.get_text_config().vocab_size)

    def one_batch(self, length: int, masked: bool) -> Iterator[Deviation]:
        inputs, targets = self.batches.batch(length, masked, number=0)
        self._zero_grad()
        expected = _step(self.reference, inputs, targets)
        actual = _step(self.sharded, self.batches.own(inputs), self.batches.own_rows(targets))
        rounding = Rounding(
            self.build, lambda model: {ALL_LOGITS: self.batches.own_rows(_step(model, inputs, targets)[0])}
        )
        wrong = list(self._logits(self.batches.own_rows(expected[0]), whole(actual[0]), rounding))
        if wrong:
            yield from wrong
            own = self.batches.own(inputs)
            at = first_difference(self.reference, self.sharded, inputs, own, self.batches.own_rows, self.told)
            if at is not None:
                yield Deviation("activation", at.fqn, f"its output is off by {at.relative:.1e} of its size", "")
            return
        loss = self.batches.mean(actual[1].detach())
        if not abs(loss - expected[1].item()) <= LOSS * abs(expected[1].item()):
            yield Deviation("loss", "", f"{loss:.8g}, not {expected[1].item():.8g}", "")
        yield from self._gradients(lambda model: _step(model, inputs, targets))

    def _own_logits(self, logits: Tensor) -> dict[str, Tensor]:
        return {ALL_LOGITS: self.batches.own_rows(logits)}

    def evaluation(self) -> Iterator[Deviation]:
        """Logits alone, in evaluation mode: models branch on it, and on lengths."""
        # torch 2.13: a forward without gradients leaves the root's parameters gathered, and zero_grad() behind it would
        # then miss the gradients of their shards.
        self._zero_grad()
        inputs, _ = self.batches.batch(LONGER, masked=False, number=99)
        own = self.batches.own(inputs)
        expected, actual = _evaluate(self.reference, inputs), whole(_evaluate(self.sharded, own))
        rounding = Rounding(self.build, lambda model: self._own_logits(_evaluate(model, inputs)))
        yield from self._logits(self.batches.own_rows(expected), actual, rounding)

    def accumulation(self) -> Iterator[Deviation]:
        for synchronises in (True, False) if isinstance(self.sharded, FSDPModule) else (True,):
            self._zero_grad()
            self._accumulate(self.reference, 0)
            self._accumulate(self.sharded, 0, synchronises)
            yield from self._gradients(lambda model: self._accumulate(model, 0))
        grads = [parameter.grad for parameter in self.reference.parameters() if parameter.grad is not None]
        expected = sqrt(sum(grad.double().norm().item() ** 2 for grad in grads))
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), CLIP) for m in (self.reference, self.sharded)]
        unsharded, actual = (whole(norm).item() for norm in norms)
        # torch 2.13 on CPU adds up squares in fp32: over millions of elements it is off by more than NORM itself.
        rounding = Rounding(self.build, self._norm_of_two)
        allowed = NORM * expected + 2 * abs(unsharded - expected)
        if not abs(actual - expected) <= allowed and not rounding.explains_norm("", abs(actual - expected)):
            yield Deviation("norm", "", f"the gradient norm is {actual:.6g}, not {expected:.6g}", "")

    def _norm_of_two(self, model: nn.Module) -> dict[str, Tensor]:
        grads = _gradients_after(lambda model: self._accumulate(model, 0), model).values()
        return {"": torch.stack([grad.double().norm() for grad in grads]).norm()}

    def training(self) -> Iterator[Deviation]:
        self._train(self.reference)
        self._train(self.sharded)
        trained = {name: parameter.detach() for name, parameter in self.sharded.named_parameters()}
        yield from map(_unequal, unequal_replicas(trained))
        rounding = Rounding(self.build, self._trained_alone)
        parameters = {name: parameter.detach() for name, parameter in self.reference.named_parameters()}
        differences = distances(stored_parameters(self.sharded), parameters)
        for name, wanted in reversed(parameters.items()):
            difference = differences[name]
            allowed = PARAMETER * wanted.norm().item() + PARAMETER_LR * LR * sqrt(wanted.numel())
            if not difference <= allowed and not rounding.explains_norm(name, difference):
                yield Deviation("parameter", name, f"off by {difference:.1e}", "")

    def _trained_alone(self, model: nn.Module) -> dict[str, Tensor]:
        self._train(model)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def _train(self, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        for number in range(3):
            model.zero_grad()
            self._accumulate(model, 10 * number, synchronises=number != 1)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    def _logits(self, wanted: Tensor, given: Tensor, rounding: Rounding) -> Iterator[Deviation]:
        if wanted.shape != given.shape:
            yield Deviation("logits", "", f"shape {tuple(given.shape)}, not {tuple(wanted.shape)}", "")
            return
        difference, allowed = (wanted - given).abs().max().item(), LOGITS * max(1.0, wanted.abs().max().item())
        if not difference <= allowed and not rounding.explains_largest(ALL_LOGITS, difference):
            yield Deviation("logits", "", f"off by {difference:.1e} where {allowed:.1e} is rounding", "")

    def _gradients(self, compute: Callable[[nn.Module], object]) -> Iterator[Deviation]:
        """From the loss backwards: the first that is wrong stands nearest to what makes the others wrong.

        Args:
            compute: has an unsharded model compute the gradients.
        """
        grads = {name: p.grad for name, p in self.sharded.named_parameters() if p.grad is not None}
        yield from map(_unequal, unequal_replicas(grads))
        wanted = {name: p.grad for name, p in self.reference.named_parameters() if p.grad is not None}
        found = {name: stored.gradient() for name, stored in stored_parameters(self.sharded).items() if name in wanted}
        given = {name: gradient for name, gradient in found.items() if gradient is not None}
        differences = distances(given, {name: wanted[name] for name in given})
        total = sqrt(sum(grad.norm().item() ** 2 for grad in wanted.values()))
        rounding = Rounding(self.build, lambda model: _gradients_after(compute, model))
        for name, expected in reversed(list(wanted.items())):
            if name not in given:
                yield Deviation("gradient", name, "missing", "")
                continue
            size, difference = expected.norm().item(), differences[name]
            if not difference <= GRADIENT * size + FLOOR * total and not rounding.explains_norm(name, difference):
                yield Deviation("gradient", name, f"off by {100 * difference / (size + 1e-30):.2g} % of its norm", "")

    def _accumulate(self, model: nn.Module, seed: int, synchronises: bool = True) -> None:
        """Two micro-batches: an unsharded model takes them whole, the sharded one its rows of them."""
        for number, length in enumerate(LENGTHS):
            inputs, targets = self.batches.batch(length, masked=False, number=1 + seed + number)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(synchronises or number == len(LENGTHS) - 1)
            if model is self.sharded:
                inputs, targets = self.batches.own(inputs), self.batches.own_rows(targets)
            _step(model, inputs, targets, weight=1 / len(LENGTHS))

    def _zero_grad(self) -> None:
        self.reference.zero_grad()
        self.sharded.zero_grad()


def _step(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """Forward and backward; logits and loss."""
    output = model(**inputs, use_cache=False)
    loss = cross_entropy(output.logits, targets)
    (loss * weight).backward()
    return output.logits.detach(), loss


def _evaluate(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        logits = model.eval()(**inputs, use_cache=False).logits
    model.train()
    return logits


def _gradients_after(compute: Callable[[nn.Module], object], model: nn.Module) -> dict[str, Tensor]:
    compute(model)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _unequal(name: str) -> Deviation:
    return Deviation("replicas", name, "its replicas differ between ranks", "")


def _names(reference: nn.Module, sharded: nn.Module) -> Iterator[Deviation]:
    """A tie that came apart gives a name more."""
    expected, actual = [name for name, _ in reference.named_parameters()], list(stored_parameters(sharded))
    for name in dict.fromkeys((*expected, *actual)):
        if (name in expected) != (name in actual):
            side = "the unsharded" if name in expected else "the sharded"
            yield Deviation("names", name, f"is a parameter of {side} model alone: a tie came apart", "after applying")
