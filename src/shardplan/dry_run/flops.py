"""The work of a forward: what one rank does of what the unsharded model would do for the same tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of matrix products, attention and convolutions in one forward.

    Element-wise work, such as the scan of a state space model without its kernels, is not counted.

    Attributes:
        whole: of the unsharded model.
        rank: of one rank.
        tp: over how many ranks a product may be shared.
    """

    whole: int
    rank: int
    tp: int

    @property
    def sharded_percent(self) -> float:
        """The share s of the whole that tp divides: a rank does (1 - s) of it, and a part of s."""
        if self.tp == 1 or not self.whole:
            return 0.0
        return round(100 * (1 - self.rank / self.whole) / (1 - 1 / self.tp), 2)
