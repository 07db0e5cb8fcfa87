"""How routed experts lie in their fused parameters, as transformers' experts say of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Parameters of fused experts, and what their biases are called after.
GIVING, TAKING, BIAS = ("gate_up_proj", "up_proj"), "down_proj", "_bias"


@dataclass(frozen=True, slots=True)
class ExpertsInfo:
    """One parameter for each projection of all experts: (experts, out, in), or ``transposed``: (experts, in, out).

    Attributes:
        gated: a gate and an up projection share a parameter.
        concatenated: the gate's features lie before the others; otherwise they take turns.
        normed: each expert's output is normed, before the experts' outputs are added up.
    """

    gated: bool
    concatenated: bool
    transposed: bool
    normed: bool

    @property
    def given(self) -> int:
        """The dim of the features that an expert's first projection gives."""
        return 2 if self.transposed else 1

    @property
    def read(self) -> int:
        """The dim of the features that an expert's first projection takes."""
        return 3 - self.given

    @property
    def taken(self) -> int:
        """The dim of the features that its last projection takes."""
        return 1 if self.transposed else 2


def experts_info(module: Any) -> ExpertsInfo | None:
    """transformers puts these attributes on every class of experts that its kernels can run."""
    names = ("has_gate", "is_concatenated", "is_transposed", "has_post_expert_norm")
    values: list[Any] = [getattr(module, name, None) for name in names]
    return ExpertsInfo(*values) if all(isinstance(value, bool) for value in values) else None
