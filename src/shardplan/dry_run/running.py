"""Which module is at work: in the forward by hooks, in the backward by the numbers of autograd nodes.

An autograd node's number tells when it was made, and so in whose forward. That holds for the nodes that hooks make,
too, as the edges of a plan are; hooks on gradients would not see them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from shardplan import _compat

LOSS = "(loss)"  # what runs outside the model's modules


class Running:
    """Follows a model through forwards and a backward. Modules go by fqn.

    Attributes:
        node: the name of the autograd node whose backward ran last.
    """

    def __init__(self) -> None:
        self.node = ""
        self._stack = [LOSS]
        self._starts: list[int] = [0]  # the first node of each stretch, and whose it is
        self._owners: list[str] = [LOSS]
        self._raised: tuple[BaseException, str] | None = None
        self._last = LOSS

    def follow(self, model: nn.Module, fqns: Mapping[str, str]) -> None:
        """Watch the modules of ``model`` that ``fqns`` names by their paths. Call it once all other hooks are there."""
        for path, module in model.named_modules():
            if path in fqns:
                # Before all hooks of the plan and of FSDP2, and after all of them.
                module.register_forward_pre_hook(partial(self._enter, fqns[path]), prepend=True)
                module.register_forward_hook(self._leave, always_call=True)

    @property
    def module(self) -> str:
        """The module at work: innermost in a forward or recomputation, else the one whose backward runs."""
        if self.forwarding:
            return self._stack[-1]
        self.note()
        return self._last

    @property
    def forwarding(self) -> bool:
        """Whether a module's forward runs; in a backward that is a recomputation."""
        return len(self._stack) > 1

    def note(self) -> None:
        """Remember whose backward is running, for the time when it has raised."""
        node = _compat.running_node()
        if node is not None:
            number, self.node = node
            self._last = self._owners[bisect_right(self._starts, number) - 1]

    def raising(self, error: BaseException) -> str:
        """The module in which ``error`` was raised."""
        if self._raised is not None and self._raised[0] is error:
            return self._raised[1]
        return self._last

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which a module calls, as work of the loss and not of that module."""

        def work(*args: Any, **kwargs: Any) -> Any:
            with self._working(LOSS):
                return function(*args, **kwargs)

        return work

    @contextmanager
    def _working(self, name: str) -> Iterator[None]:
        self._push(name)
        try:
            yield
        finally:
            self._pop()

    def _enter(self, fqn: str, _module: nn.Module, _args: Any) -> None:
        self._push(fqn)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._pop()

    def _push(self, name: str) -> None:
        self._stack.append(name)
        self._mark()

    def _pop(self) -> None:
        error = sys.exception()
        if error is not None and (self._raised is None or self._raised[0] is not error):
            self._raised = error, self._stack[-1]
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._starts.append(_compat.next_node())
        self._owners.append(self._stack[-1])
