"""Models for which transformers' own plan, completed, does not compute what the unsharded model does.

Found by tests/sweep.py; each with the property of the model that is the cause. `check` refuses them by it: what is
known to be wrong is not applied.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wrong:
    """The cause, and whether it matters only where the stream is cut."""

    reason: str
    on_cut_stream_alone: bool = False


_SEVERAL_STATES = Wrong("its layers take states of earlier ones beside the residual stream", on_cut_stream_alone=True)

KNOWN_WRONG: dict[str, Wrong] = {
    "Gemma3nForCausalLM": Wrong("its MLPs take mean and deviation over features of which each rank has a part"),
    "Gemma4ForConditionalGeneration": Wrong("it reads a row of the embedding, of whose rows each rank has a part"),
    "Inkling2ForCausalLM": _SEVERAL_STATES,
    "Inkling2LoopForCausalLM": _SEVERAL_STATES,
    "NanoChatForCausalLM": Wrong("the norm behind its layers runs before them, too", on_cut_stream_alone=True),
    "PhimoeForCausalLM": Wrong("its routers draw experts at random in training, on each rank anew"),
}
