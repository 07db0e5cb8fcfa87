"""Where a run stands, so that what it raises can be laid at a module's door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Trail:
    """How far a proof has come: its step, and the module whose forward is running.

    Attributes:
        step: in words, for findings.
    """

    def __init__(self) -> None:
        self.step = "building the model"
        self._stack: list[str] = []

    @property
    def module(self) -> str:
        """The innermost module whose forward has begun and not ended; "" between forwards."""
        return self._stack[-1] if self._stack else ""

    def follow(self, model: nn.Module) -> None:
        """What raises leaves its name on the stack: the hook behind it does not run."""
        for fqn, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(fqn), prepend=True)
            module.register_forward_hook(self._leave)

    def _enter(self, fqn: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, _args: self._stack.append(fqn)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._stack.pop()
