"""Every causal language model of transformers whose configuration has a tensor parallel plan, proven by numbers.

``python tests/sweep.py --write`` (``make sweep``) takes transformers' own plan for each as ``"auto"`` does, checks it,
and lets ``--verify`` prove it on two local ranks in both modes: logits, every gradient, replicas, the norm, two
micro-batches, AdamW steps. docs/coverage.md is its table. ``--only NAME`` looks at one type.

Two other passes fill in columns of the same rows: ``--hf`` what transformers' own tensor parallelism makes of the same
small models (tests/sweep_hf.py), ``--flags`` what becomes of the verdict where one boolean field of the configuration
is flipped (tests/sweep_flags.py). With ``--record FILE`` each pass keeps what the others found.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import sweep_flags
import sweep_hf
from shardplan.check import check
from shardplan.checks.names import general
from shardplan.checks.target import Target
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Location, PlanError, errors
from shardplan.hf.styles import HF_STYLES, Meaning
from shardplan.inventory import Inventory, take_inventory
from shardplan.lower import lower
from shardplan.merge import HF
from shardplan.mesh import parse_mesh
from shardplan.plan import Plan
from shardplan.resolve import resolve
from shardplan.resolved import ResolvedPlan
from shardplan.styles import Split
from shardplan.verify.prove import make_subject, prove
from shardplan.verify.ranks import LocalRanks, Ranks
from sweep_rows import EXACT, Row, read_record, record
from sweep_table import DOCUMENT, table

MESH = parse_mesh("dp=1,tp=2")
OURS = Plan(HF, Location(HF), over_hf=True)
RAISES = "SP401"


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROUTED = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 256, "budget": 2048, "compress_ratio": 4}
QWEN4 = {f"indexer_{name}": value for name, value in INDEXER.items()}
# What some types' default configurations leave out, and without which they do not run.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {**ROUTED, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48, "head_dim": 128},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
}


@cache
def types() -> list[str]:
    """Those whose language model's configuration class has a plan, and that are a causal language model."""
    known = (name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
    return sorted(name for name in known if getattr(_text_class(CONFIG_MAPPING[name]), "base_model_tp_plan", None))


def _text_class(config: Any) -> Any:
    """The class of the language model's configuration, inside a multimodal one."""
    return next((config.sub_configs[name] for name in ("text_config",) if name in config.sub_configs), config)


def configuration(name: str, **fields: Any) -> Any:
    """The default one, with ``fields`` of the language model."""
    needed, config_class = NEEDED.get(name, {}), CONFIG_MAPPING[name]
    if fields and _text_class(config_class) is not config_class:
        text = config_class(**needed).get_text_config().to_dict()
        return config_class(**needed, text_config={**text, **fields})
    return config_class(**{**needed, **fields})


class NotLookedAtError(Exception):
    """A type of which there is no model, or no plan."""

    def __init__(self, said: str, model: str = "") -> None:
        super().__init__(said)
        self.model = model


def build(name: str, **fields: Any) -> nn.Module:
    """The model of a type on the meta device, with its default configuration but for ``fields``.

    Raises:
        NotLookedAtError: it cannot be built, or has no plan.
    """
    try:
        config = configuration(name, **fields)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - any model's own code on its own defaults
        of = f"its default configuration with {fields}" if fields else "its own default configuration"
        raise NotLookedAtError(f"not built from {of}: {_line(error)}") from None
    if not getattr(model, "tp_plan", None):
        said = "no plan: the class does not take it up from its configuration"
        raise NotLookedAtError(said, type(model).__name__)
    return model


def look(ranks: Ranks, row: Row) -> Row:
    """The row with our own verdicts."""
    start = time.monotonic()
    try:
        model = build(row.type)
    except NotLookedAtError as error:
        return replace(row, model=error.model, tp=str(error), sp=str(error))
    inventory = take_inventory(model)
    resolved = resolve(OURS, inventory)
    tp, sp = (verdict(ranks, model, resolved, sequence_parallel) for sequence_parallel in (False, True))
    calls, hf_calls = _calls(resolved), hf_collectives(inventory)
    seconds = round(time.monotonic() - start, 1)
    return replace(
        row,
        model=inventory.architectures[0],
        tp=tp,
        sp=sp,
        body=_body(resolved),
        calls=calls,
        hf_calls=hf_calls,
        seconds=seconds,
    )


def look_at_hf(ranks: Ranks, row: Row) -> Row:
    """The row with what transformers' own tensor parallelism gives."""
    try:
        model = build(row.type)
        hf = sweep_hf.verdict(ranks, model)
    except NotLookedAtError as error:
        return replace(row, model=error.model, hf=str(error))
    except PlanError as error:
        return replace(row, model=type(model).__name__, hf=f"not shrunk: {error.diagnostics[0].message}")
    return replace(row, model=type(model).__name__, hf=hf, hf_body=sweep_hf.share(take_inventory(model)))


def look_at_flags(ranks: Ranks, row: Row) -> Row:
    """The row with our own verdicts where one boolean field is flipped."""
    try:
        default: Any = build(row.type)
    except NotLookedAtError as error:
        return replace(row, model=error.model, flags={})
    found: dict[str, tuple[str, str]] = {}
    for field, value in sweep_flags.booleans(default.config.get_text_config()):
        name = f"{field}={not value}".lower()
        try:
            flipped = build(row.type, **{field: not value})
        except NotLookedAtError as error:
            found[name] = (str(error), str(error))
            continue
        if sweep_flags.changes(default, flipped):
            resolved = resolve(OURS, take_inventory(flipped))
            found[name] = (verdict(ranks, flipped, resolved, False), verdict(ranks, flipped, resolved, True))
    return replace(row, model=type(default).__name__, flags=found)


def verdict(ranks: Ranks, model: nn.Module, resolved: ResolvedPlan, sequence_parallel: bool) -> str:
    """Of the checks, and where these pass, of the proof."""
    target = Target(resolved, MESH, sequence_parallel)
    refused = errors(check(target))
    if refused:
        return f"refused: {refused[0].code} {refused[0].message}"
    try:
        subject = make_subject(model, target, ranks.size)
    except PlanError as error:
        return f"not shrunk: {error.diagnostics[0].message}"
    found = prove(target, subject, ranks)
    verdict = "raises" if found and found[0].code == RAISES else "WRONG"
    return f"{verdict}: {found[0].code} {found[0].message}" if found else EXACT


def _body(resolved: ResolvedPlan) -> float:
    ends = (resolved.inventory.embedding, resolved.inventory.head)
    body = [p for module in resolved.modules if module.fqn not in ends for p in module.parameters]
    cut = sum(p.info.numel for p in body if p.style is not None and p.style.split is not Split.NONE)
    whole = sum(p.info.numel for p in body)
    return round(100 * cut / whole, 1) if whole else 0.0


def _calls(resolved: ResolvedPlan) -> int:
    try:
        compiled: CompiledPlan = lower(resolved, MESH, sequence_parallel=False)
    except ValueError:
        return 0
    return sum(1 for _ in compiled.collectives())


# Forward and backward calls of each style of transformers 5.24, standing alone as it does there.
HF_CALLS = {
    Meaning.CUT_OUTPUT: 1,
    Meaning.CUT_INPUT: 1,
    Meaning.GATHERED_OUTPUT: 2,
    Meaning.SCATTERED_INPUT: 2,
    Meaning.PACKED_OUTPUT: 1,
    Meaning.CUT_ROWS: 1,
    Meaning.CUT_COLUMNS: 1,
    Meaning.PARTIAL_GRADIENT: 1,
    Meaning.PARTIAL_KEYS: 1,
    Meaning.EXPERTS: 3,
    Meaning.SUMMED_OUTPUT: 1,
}


def hf_collectives(inventory: Inventory) -> int:
    """Of transformers' own plan, by what its styles do to modules; rules for single parameters send nothing."""
    plan = dict(inventory.tp_plan)
    styles = (plan.get(general(module.fqn)) for module in inventory.modules)
    return sum(HF_CALLS.get(HF_STYLES[style].meaning, 0) for style in styles if style in HF_STYLES)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


# ---------------------------------------------------------------- the command

Look = Callable[[Ranks, Row], Row]
# By pass: what looks, whether a row has been looked at, and what to print of it.
PASSES: dict[str, tuple[Look, Callable[[Row], bool], Callable[[Row], str]]] = {
    "own": (
        look,
        lambda row: bool(row.tp),
        lambda row: f"TP {row.tp[:200]} | SP {row.sp[:200]} | {row.body} % {row.seconds:.0f} s",
    ),
    "flags": (
        look_at_flags,
        lambda row: row.flags is not None,
        lambda row: "; ".join(f"{flag}: {tp[:120]} | {sp[:120]}" for flag, (tp, sp) in (row.flags or {}).items()),
    ),
    "hf": (look_at_hf, lambda row: bool(row.hf), lambda row: f"transformers: {row.hf} | {row.hf_body} %"),
}


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", help="one type of model; may be repeated")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every other type alone, for two runs side by side")
    parser.add_argument("--record", type=Path, help="a file for the rows, one JSON object a line; rows there are kept")
    for other in ("hf", "flags"):
        parser.add_argument(f"--{other}", dest="name", action="store_const", const=other, help="that pass alone")
    parser.set_defaults(name="own")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    arguments = parser.parse_args()
    known = read_record(arguments.record)
    chosen = types() if arguments.half is None else types()[arguments.half :: 2]
    take, taken, shown = PASSES[arguments.name]
    with LocalRanks(2) as ranks:
        for name in arguments.only or chosen:
            if name in known and taken(known[name]) and not arguments.only:
                continue
            known[name] = take(ranks, known.get(name, Row(name)))
            print(f"{name}: {shown(known[name])}", file=sys.stderr)
            if arguments.record:
                record(arguments.record, known[name])
    if arguments.write:
        DOCUMENT.write_text(table(known.values(), len(types())))


if __name__ == "__main__":
    main()
