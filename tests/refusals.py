"""Types of models whose plan the checks refuse, reviewed one by one: the property of the model that is the cause.

A refusal that is not in this list, or for another reason than the one here, fails tests/test_sweep.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """``modes``: those that are refused; ``code``: the diagnostic; ``cause``: of the model, as the document has it."""

    modes: tuple[str, ...]
    code: str
    cause: str


BOTH, SP = ("TP", "SP"), ("SP",)
_HYPER = "each layer hands on several residual streams side by side, and a mixer, no norm, ends them"
_STATES = "layers take states of earlier ones beside the residual stream, which would be cut without them"

REVIEWED = {
    "axk1": Refusal(
        BOTH,
        "SP208",
        "its mixtures of experts end in a norm over the sum of routed and shared experts, inside the block",
    ),
    "doge": Refusal(
        BOTH, "SP203", "its attention derives a mask for each KV head from the values of all of them (`dt_proj`)"
    ),
    "dory": Refusal(
        SP, "SP204", "transformers' plan cuts no linear of a layer, and some layers run in a loop with the last norm"
    ),
    "gemma3n_text": Refusal(
        BOTH, "SP106", "its MLPs take mean and deviation over features, of which each rank has a part"
    ),
    "gemma4": Refusal(BOTH, "SP106", "it reads a row of the embedding, of whose rows each rank has a part"),
    "hrm_text": Refusal(
        SP, "SP204", "two stacks of layers take turns on one state, with no single stream through them"
    ),
    "inkling2_loop_text": Refusal(SP, "SP106", _STATES),
    "inkling2_text": Refusal(SP, "SP106", _STATES),
    "nanochat": Refusal(SP, "SP106", "the norm behind its layers runs before them, too"),
    "phimoe": Refusal(BOTH, "SP106", "its routers draw experts at random in training, on each rank anew"),
    "qwen4_exp": Refusal(SP, "SP204", _HYPER),
    "qwen4_exp_text": Refusal(SP, "SP204", _HYPER),
}
