"""Every causal language model of transformers whose configuration has a tensor parallel plan, proven by numbers.

``python tests/sweep.py --write`` (``make sweep``) takes transformers' own plan for each as ``"auto"`` does, checks it,
and lets ``--verify`` prove it on two local ranks in both modes: logits, every gradient, replicas, the norm, two
micro-batches, AdamW steps. docs/coverage.md is its table. ``--only NAME`` looks at one type.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
from shardplan.resolve import ResolvedPlan, resolve
from shardplan.styles import Split
from shardplan.verify.prove import make_subject, prove
from shardplan.verify.ranks import LocalRanks

DOCUMENT = Path(__file__).parents[1] / "docs" / "coverage.md"
MESH = parse_mesh("dp=1,tp=2")
OURS = Plan(HF, Location(HF), over_hf=True)
EXACT = "exact"
RAISES = "SP401"


@dataclass(frozen=True)
class Row:
    """One type of model: what came of its plan in each mode, and how much of it is cut.

    Attributes:
        tp, sp: ``exact``; ``refused: ...`` by the checks; ``raises: ...`` or ``WRONG: ...`` though they let it pass.
        body: percent of the parameters beside embedding and head that are cut.
        calls, hf_calls: collectives over tp for a forward and a backward, ours and those that transformers' own styles
            make, on the default configuration.
    """

    type: str
    model: str
    tp: str
    sp: str
    body: float
    calls: int
    hf_calls: int
    seconds: float


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROUTED = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
# What some types' default configurations leave out, and without which they do not run.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {**ROUTED, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
}


@cache
def types() -> list[str]:
    """Those whose language model's configuration class has a plan, and that are a causal language model."""
    known = (name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
    return sorted(name for name in known if getattr(_text_class(CONFIG_MAPPING[name]), "base_model_tp_plan", None))


def _text_class(config: Any) -> Any:
    """The class of the language model's configuration, inside a multimodal one."""
    return next((config.sub_configs[name] for name in ("text_config",) if name in config.sub_configs), config)


def configuration(name: str) -> Any:
    return CONFIG_MAPPING[name](**NEEDED.get(name, {}))


def look(ranks: LocalRanks, name: str) -> Row:
    start = time.monotonic()
    try:
        config = configuration(name)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - any model's own code on its own defaults
        said = f"not built from its own default configuration: {_line(error)}"
        return Row(name, "", said, said, 0.0, 0, 0, 0.0)
    inventory = take_inventory(model)
    if not inventory.tp_plan:
        said = "no plan: the class does not take it up from its configuration"
        return Row(name, inventory.architectures[0], said, said, 0.0, 0, 0, 0.0)
    resolved = resolve(OURS, inventory)
    verdicts = [_verdict(ranks, model, resolved, sequence_parallel) for sequence_parallel in (False, True)]
    calls, hf_calls = _calls(resolved), hf_collectives(inventory)
    return Row(name, inventory.architectures[0], *verdicts, _body(resolved), calls, hf_calls, time.monotonic() - start)


def _verdict(ranks: LocalRanks, model: nn.Module, resolved: ResolvedPlan, sequence_parallel: bool) -> str:
    target = Target(resolved, MESH, sequence_parallel)
    refused = errors(check(target))
    if refused:
        return f"refused: {refused[0].code} {refused[0].message}"
    try:
        subject = make_subject(model, MESH, ranks.size)
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


# ---------------------------------------------------------------- the table

INTRODUCTION = f"""# What becomes of transformers' own plans

<!-- written by tests/sweep.py -->

Each row is a causal language model of transformers {transformers.__version__} whose configuration has a `tp_plan`. The
plan is taken as `extends: hf` takes it and completed; the model is made small by `--verify`'s shrinker, given random
weights, norms and routers, and compared on two local ranks with the unsharded one: logits, every gradient, replicas,
the gradient norm over two micro-batches, parameters after AdamW steps, in tensor parallel (TP) and sequence parallel
(SP). *Body* is the share of the parameters beside embedding and head that is cut. *Calls* are collectives over tp in
one forward and backward of the default configuration in TP, ours and, by the meaning of its styles, transformers' own.
"""


def table(rows: Iterable[Row]) -> str:
    listed = sorted(rows, key=lambda row: row.type)
    built = [row for row in listed if row.model]
    lines = [INTRODUCTION]
    if len(listed) < len(types()):
        lines.append(f"Looked at so far: {len(listed)} of {len(types())} types.\n")
    for mode, verdicts in (("TP", [row.tp for row in built]), ("SP", [row.sp for row in built])):
        exact, wrong = verdicts.count(EXACT), sum(verdict.startswith("WRONG") for verdict in verdicts)
        share = 100 * exact / len(verdicts) if verdicts else 0
        lines.append(f"- {mode}: {exact} of {len(verdicts)} exact ({share:.1f} %), {wrong} wrong")
    large = sum(row.body >= 90 for row in built if row.tp == EXACT)
    lines += [
        f"- at least 90 % of the body cut: {large} of the {sum(row.tp == EXACT for row in built)} exact in TP",
        "",
    ]
    lines += [
        "| type | class | TP | SP | body | calls | transformers' calls |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in listed:
        cells = (row.type, row.model, row.tp, row.sp, f"{row.body:g} %", str(row.calls), str(row.hf_calls))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def read_table() -> dict[str, tuple[str, str]]:
    """The verdicts of docs/coverage.md by type."""
    rows = (line.strip("| \n").split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| "))
    return {cells[0]: (cells[2], cells[3]) for cells in rows if len(cells) == 7 and cells[0] not in ("type", "---")}


def sweep(names: Iterable[str]) -> Iterator[Row]:
    with LocalRanks(2) as ranks:
        for name in names:
            yield look(ranks, name)


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", help="one type of model; may be repeated")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every other type alone, for two runs side by side")
    parser.add_argument("--record", type=Path, help="a file for the rows, one JSON object a line; rows there are kept")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    arguments = parser.parse_args()
    known = {}
    if arguments.record and arguments.record.exists():
        known = {row["type"]: Row(**row) for row in map(json.loads, arguments.record.read_text().splitlines())}
    chosen = types() if arguments.half is None else types()[arguments.half :: 2]
    for name in arguments.only or chosen:
        if name in known and not arguments.only:
            continue
        (known[name],) = sweep([name])
        row = known[name]
        print(f"{row.type}: TP {row.tp[:200]} | SP {row.sp[:200]} | {row.body} % {row.seconds:.0f} s", file=sys.stderr)
        if arguments.record:
            with arguments.record.open("a") as file:
                print(json.dumps(asdict(row)), file=file)
    if arguments.write:
        DOCUMENT.write_text(table(known.values()))


if __name__ == "__main__":
    main()
