"""How much of a difference is rounding: what the unsharded model in fp32 is off from itself in double precision.

Models differ in it: scaled embeddings add up numbers of many sizes, and AdamW moves a key bias, whose true gradient is
zero, by whole learning rates into the direction that rounding gives it. It is measured only where a fixed tolerance
does not hold, and on the unsharded model alone: no plan has a say in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

# Two sums of the same numbers in another order are each off by about as much as was measured on one.
ROUNDINGS = 4


@dataclass(frozen=True)
class Rounding:
    """Of tensors that a model computes, by name.

    Attributes:
        build: gives the unsharded model in fp32, the same one each time.
        compute: has a model compute the tensors.
    """

    build: Callable[[], nn.Module]
    compute: Callable[[nn.Module], Mapping[str, Tensor]]

    @cached_property
    def _errors(self) -> dict[str, Tensor]:
        """Empty where the model does not run in double precision: then nothing is explained by rounding."""
        single = self.compute(self.build())
        try:
            double = self.compute(self.build().double())
        except RuntimeError:  # torch's for dtypes that do not fit together
            return {}
        return {name: double[name] - tensor for name, tensor in single.items()}

    def explains_largest(self, name: str, difference: float) -> bool:
        """Whether no more than rounding is in ``difference``, the largest one among a tensor's elements."""
        return name in self._errors and difference <= ROUNDINGS * self._errors[name].abs().max().item()

    def explains_norm(self, name: str, difference: float) -> bool:
        """The same for the norm of a tensor of differences."""
        return name in self._errors and difference <= ROUNDINGS * self._errors[name].norm().item()
