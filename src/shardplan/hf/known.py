"""Models for which transformers' own plan, completed, does not compute what the unsharded model does.

Found by tests/sweep.py; each with what happens. `check` refuses them by it: what is known to be wrong is not applied.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wrong:
    """Why, and whether only where the stream is cut."""

    reason: str
    on_cut_stream_alone: bool = False


KNOWN_WRONG: dict[str, Wrong] = {
    "Gemma3nForCausalLM": Wrong("its layers read weights of their children's children"),
    "Gemma4ForCausalLM": Wrong(
        "its logits are off by more than rounding, and its layers take inputs beside the stream"
    ),
    "Llama4ForCausalLM": Wrong("its layers scale and mask by positions of the sequence that they see", True),
    "DeepseekV4ForCausalLM": Wrong("its attention shapes activations by the sequence that the layer sees", True),
}
