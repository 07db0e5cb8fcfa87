"""The style names of transformers' plans, past and present: one row each, with what becomes of it here.

A row says what a name means in a plan of transformers, where every rule stands alone and converts for itself. Where
rules belong to one block, `shardplan.hf.derive` gives the conversions to the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Meaning(Enum):
    """What a style of transformers does to its module or parameter."""

    CUT_OUTPUT = "output features cut; the input's gradient is summed"
    CUT_INPUT = "input features cut; the output is summed"
    GATHERED_OUTPUT = "output features cut, then gathered"
    SCATTERED_INPUT = "a whole input scattered, input features cut, the output summed"
    PACKED_OUTPUT = "two halves, each cut along its output features"
    PACKED_LAST = "two halves, each cut along the last dim"
    CUT_ROWS = "an embedding's rows cut; the output is summed"
    CUT_COLUMNS = "an embedding's columns cut, then gathered"
    PARTIAL_GRADIENT = "whole, with a gradient to be summed"
    PARTIAL_KEYS = "whole, with a gradient to be summed in part: the rotary half of latent attention's keys"
    EXPERTS = "experts, each rank with a part of each; input gradients and outputs are summed"
    IDENTITY_EXPERT = "an expert that hands its input through, on every rank; counted once"
    SUMMED_OUTPUT = "the output is a part of a sum"
    LOCAL = "reads its own parameters locally"
    ON_STREAM = "a norm on the cut sequence"
    WHOLE = "whole"
    UNITS_FREED = "an FSDP2 unit, freed after the forward"
    UNITS_KEPT = "an FSDP2 unit that is kept gathered"


@dataclass(frozen=True, slots=True)
class HfStyle:
    """A name, the versions of transformers that know it, and its meaning."""

    name: str
    versions: str
    meaning: Meaning


HF_STYLES: dict[str, HfStyle] = {
    name: HfStyle(name, versions, meaning)
    for name, versions, meaning in (
        ("colwise", "4.4x on", Meaning.CUT_OUTPUT),
        ("rowwise", "4.4x on", Meaning.CUT_INPUT),
        ("colwise_gather_output", "5.1 on", Meaning.GATHERED_OUTPUT),
        ("colwise_rep", "4.4x on", Meaning.GATHERED_OUTPUT),
        ("rowwise_split_input", "5.1 on", Meaning.SCATTERED_INPUT),
        ("rowwise_rep", "4.4x on", Meaning.SCATTERED_INPUT),
        ("packed_colwise", "4.5x on", Meaning.PACKED_OUTPUT),
        ("local_packed_colwise", "4.5x", Meaning.PACKED_OUTPUT),
        ("packed_rowwise", "4.5x on", Meaning.PACKED_LAST),
        ("local_packed_rowwise", "4.5x", Meaning.PACKED_OUTPUT),  # its name notwithstanding: of gate_up_proj
        ("embedding_rowwise", "5.0 on", Meaning.CUT_ROWS),
        ("embedding_colwise", "5.2x on", Meaning.CUT_COLUMNS),
        ("vocab_parallel_rowwise", "5.0", Meaning.CUT_ROWS),
        ("replicated_with_grad_allreduce", "5.0 on", Meaning.PARTIAL_GRADIENT),
        ("mla_kv_a_proj", "5.1 on", Meaning.PARTIAL_KEYS),
        ("moe_tp_experts", "5.0 on", Meaning.EXPERTS),
        ("moe_identity_expert", "5.1 on", Meaning.IDENTITY_EXPERT),
        ("all_reduce", "5.0 on", Meaning.SUMMED_OUTPUT),
        ("gather", "4.5x", Meaning.SUMMED_OUTPUT),  # its name notwithstanding
        ("local_params", "5.2x on", Meaning.LOCAL),
        ("local", "4.5x", Meaning.LOCAL),
        ("local_colwise", "4.5x", Meaning.CUT_OUTPUT),
        ("local_rowwise", "4.5x", Meaning.CUT_INPUT),
        ("sequence_parallel", "4.5x on", Meaning.ON_STREAM),
        ("replicate", "4.5x on", Meaning.WHOLE),
        ("free_full_weight", "5.2x on", Meaning.UNITS_FREED),
        ("keep_full_weight", "5.2x on", Meaning.UNITS_KEPT),
    )
}
