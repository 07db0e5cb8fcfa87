"""The shipped Llama plan with one thing altered: refused, or accepted for a reason that is written down here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import parity
from parity import Batch, Case
from pool import Pool
from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.diagnostics import Severity
from shardplan.inventory import Inventory, take_inventory
from shardplan.merge import read_plan
from shardplan.mesh import parse_mesh
from shardplan.resolve import resolve
from tiny_models import build_meta

PLAN = """\
format: 1
architectures: [LlamaForCausalLM]
root: [model]
rules:
  .embed_tokens: embedding_rowwise
  .rotary_emb: rotary
  .layers.0: {input: replicate -> stream}
  .layers.*.input_layernorm: sequence_parallel
  .layers.*.post_attention_layernorm: sequence_parallel
  .layers.*.self_attn: block
  .layers.*.mlp: block
  .layers.*.self_attn.q_proj: colwise
  .layers.*.self_attn.k_proj: colwise
  .layers.*.self_attn.v_proj: colwise
  .layers.*.mlp.gate_proj: colwise
  .layers.*.mlp.up_proj: colwise
  .layers.*.self_attn.o_proj: rowwise
  .layers.*.mlp.down_proj: rowwise
  .norm: {style: sequence_parallel, output: stream -> replicate}
  lm_head: {style: colwise, output: shard(-1)}
fsdp:
  units: {".layers.*": {}}
fallback: none
"""
RULES = dict(line.strip().split(": ", 1) for line in PLAN.splitlines() if line.startswith("  ") and "units" not in line)

# What a rule may say instead of what it says.
VALUES = (
    "null",
    "block",
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "sequence_parallel",
    "replicated_with_grad_allreduce",
    "{input: replicate -> stream}",
    "{input: stream -> replicate}",
    "{output: stream -> replicate}",
    "{output: partial -> replicate}",
    "{style: colwise, input: replicate}",
    "{style: colwise, input: stream -> replicate}",
    "{style: colwise, output: shard(-1) -> replicate}",
    "{style: colwise, output: partial -> replicate}",
    "{style: rowwise, output: partial -> replicate}",
    "{style: rowwise, input: replicate -> shard(-1)}",
    "{style: sequence_parallel, input: stream -> replicate}",
    "{style: block, output: partial -> replicate}",
    "{style: block, output: replicate -> stream}",
    "{style: block, input: replicate}",
    "{style: block, input: stream -> shard(-1)}",
)

ANY = ".layers.*."
Q, K, V, OUT, GATE, UP, DOWN = (ANY + name for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
))  # fmt: skip

Mutant = tuple[str, str, str]  # rule, new value ("" without the rule), plan
Harmless = tuple[str, str, dict[str, list[str]]]  # reason, modes, new values by rule

# What is accepted in both modes, or with tensor parallelism alone, and why it computes what the plan did before.
HARMLESS: list[Harmless] = [
    ("a replicated embedding or head is whole on every rank", "TP SP", {
        ".embed_tokens": ["null"], "lm_head": ["null"]}),
    ("the same cut of the embedding, or its columns, gathered", "TP SP", {
        ".embed_tokens": ["rowwise", "{style: rowwise, output: partial -> replicate}",
                          "{style: colwise, output: shard(-1) -> replicate}"]}),
    ("position tables have no parameters and are whole in any case", "TP SP", {
        ".rotary_emb": [""]}),
    ("inside a block, edges belong to the block", "TP SP", {
        **{linear: ["colwise_gather_output"] for linear in (Q, K, V, GATE, UP)},
        **{linear: ["rowwise_split_input"] for linear in (OUT, DOWN)}}),
    ("the same head, or its logits gathered", "TP SP", {
        "lm_head": ["colwise", "{style: colwise, input: replicate}", "colwise_gather_output",
                    "{style: colwise, output: shard(-1) -> replicate}"]}),
    ("the head's input features cut and its logits summed", "TP SP", {
        "lm_head": ["rowwise_split_input", "{style: rowwise, input: replicate -> shard(-1)}"]}),
    ("the stream is replicate, so that nothing is converted", "TP", {
        ".layers.0": ["", "null", "{input: stream -> replicate}", "{output: stream -> replicate}"],
        **{norm: ["{style: sequence_parallel, input: stream -> replicate}"]
           for norm in (ANY + "input_layernorm", ANY + "post_attention_layernorm", ".norm")},
        ".rotary_emb": ["{style: sequence_parallel, input: stream -> replicate}",
                        "{input: replicate -> stream}", "{input: stream -> replicate}",
                        "{output: stream -> replicate}"],
        **{ANY + block: ["{style: block, output: partial -> replicate}", "{style: block, input: replicate}"]
           for block in ("self_attn", "mlp")},
        "lm_head": ["{style: colwise, input: stream -> replicate}"]}),
    ("sequence_parallel is plain replication while the stream is whole", "TP", {
        ".embed_tokens": ["sequence_parallel"],
        ".norm": ["sequence_parallel"],
        "lm_head": ["sequence_parallel", "{style: sequence_parallel, input: stream -> replicate}"]}),
    ("a layer that a rule for all of it leaves whole, which is noted", "TP", {
        ".layers.0": ["sequence_parallel", "{style: sequence_parallel, input: stream -> replicate}"]}),
    ("a norm's gradient is complete while the stream is whole", "TP", {
        ".norm": ["null"], ANY + "input_layernorm": ["null"], ANY + "post_attention_layernorm": ["null"]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Inventory:
    return take_inventory(build_meta("llama"))


def passed_modes(plan: str, inventory: Inventory, folder: Path) -> str:
    """The modes in which nothing speaks against a plan, warnings included: "", "TP", "SP" or "TP SP"."""
    path = folder / "plan.yaml"
    path.write_text(plan)
    resolved, mesh = resolve(read_plan(path), inventory), parse_mesh("dp=2,tp=2")
    modes = {"TP": False, "SP": True}
    found = {name: check(Target(resolved, mesh, mode)) for name, mode in modes.items()}
    return " ".join(name for name in modes if all(finding.severity is Severity.NOTE for finding in found[name]))


def mutants() -> Iterator[Mutant]:
    for rule, value in RULES.items():
        line = f"  {rule}: {value}\n"
        assert line in PLAN
        yield rule, "", PLAN.replace(line, "")
        for other in VALUES:
            if other != value:
                yield rule, other, PLAN.replace(line, f"  {rule}: {other}\n")


def test_the_plan_itself_is_accepted(llama: Inventory, tmp_path: Path) -> None:
    assert passed_modes(PLAN, llama, tmp_path) == "TP SP"


def test_what_is_altered_is_refused_or_harmless(llama: Inventory, tmp_path: Path) -> None:
    passed = {(rule, value): passed_modes(plan, llama, tmp_path) for rule, value, plan in mutants()}
    assert len(passed) > 350
    harmless = {(rule, value): modes for _, modes, rules in HARMLESS for rule in rules for value in rules[rule]}
    assert {key: modes for key, modes in passed.items() if modes} == harmless


@pytest.mark.parametrize("entry", HARMLESS, ids=[reason for reason, _, _ in HARMLESS])
def test_what_is_accepted_computes_the_same(pool: Pool, tmp_path: Path, entry: Harmless) -> None:
    """The first of each kind, in one mode; ``python tests/test_mutations.py`` compares all of them in all."""
    assert faults(pool, tmp_path, accepted(entry)[0], entry[1].split()[-1]) == []


def accepted(entry: Harmless) -> list[Mutant]:
    return [mutant for mutant in mutants() if mutant[1] in entry[2].get(mutant[0], ())]


def faults(pool: Pool, folder: Path, mutant: Mutant, modes: str) -> list[str]:
    """Where a mutant departs from the unsharded model, in the modes that it is accepted in."""
    rule, value, plan = mutant
    path = folder / "mutant.yaml"
    path.write_text(plan)
    found = []
    for mode in modes.split():
        case = Case("llama", "tp=2", sequence_parallel=mode == "SP", plan=str(path))
        ranks = pool.run(2, parity.compare, case, [Batch(length=16, mask=True), Batch(length=5, labels=True)])
        found += [f"{rule}: {value} ({mode}): {fault}" for rank in ranks for fault in rank]
    return found


def main() -> None:
    pool = Pool()
    with tempfile.TemporaryDirectory() as folder:
        for entry in HARMLESS:
            for mutant in accepted(entry):
                print(mutant[:2], faults(pool, Path(folder), mutant, entry[1]) or "computes the same")
    pool.close()


if __name__ == "__main__":
    main()
