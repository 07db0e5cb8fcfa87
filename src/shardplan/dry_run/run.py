"""One training step of the real-size model under a plan, on fake tensors and a fake process group."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardplan import _compat
from shardplan.apply import apply
from shardplan.checks.target import Target
from shardplan.diagnostics import Diagnostic
from shardplan.dry_run.calls import Call, Recorder
from shardplan.dry_run.compare import differences, governing
from shardplan.dry_run.flops import Flops
from shardplan.dry_run.ranks import fake_ranks
from shardplan.dry_run.running import LOSS, Running
from shardplan.loss import cross_entropy
from shardplan.lower import lower

LENGTH = 4096  # tokens of a sequence, where the model has positions for as many


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a step came to.

    Attributes:
        length: tokens; there is one sequence for each rank.
        calls: every collective of this rank, in order; none where the step could not be finished.
        flops: the work of the forward; None where the step could not be finished.
        findings: what raised, or what was sent otherwise than the compiled plan says.
    """

    length: int
    calls: tuple[Call, ...]
    flops: Flops | None
    findings: tuple[Diagnostic, ...]


def dry_run(target: Target, model: nn.Module, length: int = LENGTH) -> DryRun:
    """Run a forward and a backward of ``model`` with the plan applied; no weights, no ranks, no memory for tensors.

    Args:
        target: a plan on a mesh and in a mode that the checks have passed.
        model: built anew on the meta device; the plan is applied to it.
        length: tokens of a sequence; fewer where the model has fewer positions or tp does not divide it.

    Raises:
        PlanError: SP904, this process belongs to a process group.
    """
    compiled = lower(target.resolved, target.mesh, sequence_parallel=target.sequence_parallel)
    unsharded = copy.deepcopy(model)
    step = _Step(model, _usable_length(model, length, target.mesh.tp))
    with fake_ranks(target.mesh) as mesh:
        try:
            apply(model, compiled, mesh)
            calls = step.run(target)
        except Exception as error:  # noqa: BLE001 - any code of any model under any plan: the finding is that it raises
            return DryRun(step.length, (), None, (_raised(error, step, target),))
    flops = Flops(_whole_flops(unsharded, step.length), step.flops, target.mesh.tp)
    return DryRun(step.length, calls, flops, tuple(differences(calls, compiled, target.resolved)))


@dataclass
class _Step:
    """A step under way: how far it is, and which module is at work."""

    model: nn.Module
    length: int
    running: Running = field(default_factory=Running)
    phase: str = "while the plan is applied"
    flops: int = 0

    def run(self, target: Target) -> tuple[Call, ...]:
        modules = target.resolved.inventory.modules
        self.running.follow(self.model, {module.path: module.fqn for module in modules})
        recorder = Recorder(self.running, {module.outermost: module.fqn for module in modules})
        self.phase = "in the forward"
        _set_loss_apart(self.model, self.running)
        with _compat.fake_tensors():
            _prepare(self.model)
            with recorder:
                loss, self.flops = _counted_forward(self.model, self.length)
                self.phase, recorder.backward = "in the backward", True
                loss.backward()
        return tuple(recorder.calls)


def _prepare(model: nn.Module) -> None:
    """For a step in training, inside fake tensors."""
    _give_memory(model)
    _compat.choose_experts_of_fixed_shape(model)
    model.train()


def _counted_forward(model: nn.Module, length: int) -> tuple[Tensor, int]:
    """The loss of one sequence, and what its forward took."""
    with FlopCounterMode(display=False) as counter:
        loss = _forward(model, torch.zeros((1, length), dtype=torch.long))
    return loss, int(counter.get_total_flops())


def _whole_flops(unsharded: nn.Module, length: int) -> int:
    with _compat.fake_tensors(), torch.no_grad():
        _prepare(unsharded)
        return _counted_forward(unsharded, length)[1]


def _give_memory(model: nn.Module) -> None:
    """Off the meta device, inside fake tensors: parameters, buffers, and tensors that modules just hold."""
    model.to_empty(device="cpu")
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, torch.empty_like(value, device="cpu"))


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of ``ids``, (1, length): the model's own where it takes ``labels``."""
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    if "labels" in accepted:
        output = model(input_ids=ids, labels=ids, **options)
    else:
        output = model(input_ids=ids, **options) if "input_ids" in accepted else model(ids, **options)
    loss = getattr(output, "loss", None)
    if loss is None:
        logits: Tensor = getattr(output, "logits", output)
        loss = cross_entropy(logits, ids)
    assert isinstance(loss, Tensor)
    return loss


def _set_loss_apart(model: Any, running: Running) -> None:
    """A model of transformers calls its loss from its forward, which would else count as the model's."""
    function = getattr(model, "loss_function", None)
    if function is not None:
        model.loss_function = running.outside(function)


def _usable_length(model: nn.Module, length: int, tp: int) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None) or length
    return max(min(length, most) // tp, 1) * tp


# ---------------------------------------------------------------- what raised


def _raised(error: Exception, step: _Step, target: Target) -> Diagnostic:
    said = " ".join(filter(None, [f"{type(error).__name__}:", next(iter(str(error).splitlines()), "")]))
    module = step.running.raising(error)
    resolved = target.resolved
    if _compat.needs_values(error):
        return Diagnostic(
            "SP904",
            f"{_spoken(module, target)} decides by values, which a dry run has none of ({said})",
            subject=module,
            expected="a forward whose course depends on shapes alone",
            hint="prove the plan by numbers instead: plan-compile --verify",
        )
    return Diagnostic(
        "SP401",
        f"{_spoken(module, target)} raises {step.phase}: {said}",
        where=governing(resolved, module),
        subject=module,
        expected="a forward and a backward that run on what this plan leaves on each rank",
        hint="look for what the module takes from its config or from another module's shape, which the plan changes",
    )


def _spoken(module: str, target: Target) -> str:
    if module == LOSS:
        return "the loss"
    info = target.resolved.inventory.by_fqn[module]
    return f"{module or 'the model'} ({info.class_name})"
