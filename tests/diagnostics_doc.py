"""docs/diagnostics.md, made of the broken plans and what they print; ``python tests/golden.py`` writes it."""

from __future__ import annotations

from pathlib import Path

from golden import ROOT, arguments, broken_plans
from shardplan.diagnostics import CODES

DOCUMENT = ROOT / "docs" / "diagnostics.md"

INTRODUCTION = """\
# Diagnostics

Every finding of `plan-compile` and `apply_plan` has a code that stays the same over releases. An `error` refuses the
plan, a `warning` does so under `--strict`, a `note` never does. `plan-compile` exits with 1 when a plan is wrong, and
with 2 when it could not be checked: SP001, SP901, SP904, and SP301 for a `--mesh` of the command line.

Each code is shown with broken plans that trigger it and what `plan-compile --check plan.yaml` then prints. Where a
rule is at fault, what follows from it alone is not reported: mend it and check again.

<!-- Written by `make golden` from tests/broken_plans; a test compares. -->
"""

GROUPS = {
    "0": "The file",
    "1": "The plan against the model",
    "2": "The plan against the mesh and the layouts",
    "3": "The mesh and the call",
    "4": "What a run shows",
    "9": "Could not check",
}

# What a code means and what to do, beyond its title and the hints that it comes with.
MEANING = {
    "SP001": "The path is wrong, or the name is not one of the shipped plans. Nothing is said about any plan.",
    "SP002": "YAML itself gives up at this place; the mistake is there or on the line above.",
    "SP003": "`*`, `@`, `{`, `[`, `?`, `&`, `!`, `%` and a backquote start something else in YAML. Quote the text. "
    "Patterns that start with a dot or a name need no quotes.",
    "SP004": "YAML keeps the last of two equal keys in silence; shardplan does not. Keep one.",
    "SP005": "Keys are text. Quote what YAML reads as another type.",
    "SP006": "A forgotten value. To replicate on purpose, write `null`.",
    "SP007": "A key that format 1 does not have.",
    "SP008": "A value of another type, or one that the key does not take.",
    "SP009": "See the grammar in [the plan format](plan-format.md).",
    "SP010": "Layouts are `replicate`, `partial`, `stream` and `shard(N)`; `a -> b` converts.",
    "SP011": "`extends` names a shipped plan or a file from the folder of the file that says so.",
    "SP012": "The file was found, but is empty, not UTF-8 text, or too large to be a plan.",
    "SP101": "Styles of your own are registered from Python before the plan is applied. There is no fallback.",
    "SP102": "Every alternative of every pattern has to match, because a rule that matches nothing does nothing; "
    "in a layer that is extended it is only a warning. Mark "
    "what only some models have with a final `?`. When many patterns look in one wrong place, `root` is what is wrong.",
    "SP103": "Higher layers win, then more specific patterns; where neither decides, the plan has to.",
    "SP104": "Whatever no rule decides about would stay whole on every rank: wasted memory at best. Decide.",
    "SP105": "Styles that split weights fit linears and embeddings, as whole modules. Linears that pack several "
    "projections into one weight cannot be cut as one.",
    "SP106": "`architectures` lists the classes that a plan is for; classes derived from them count.",
    "SP107": "A leading dot stands for the first of `root` that the model has.",
    "SP108": "As SP102, for what FSDP2 wraps and what is recomputed.",
    "SP109": "FSDP2 wraps modules whose forward runs, and a parameter lies in one unit.",
    "SP110": "What does nothing is usually meant to do something: it is overridden, or aims beside its mark.",
    "SP111": "Right, but FSDP2 then gathers more at once, or more often, than a step needs.",
    "SP201": "Columns may divide where heads do not; the heads, or the groups of a Mamba-2 mixer, would be torn apart. "
    "Choose one of the degrees given.",
    "SP202": "A dim need not divide evenly: the last ranks then have less. But each rank needs a row of it, and "
    "an edge gathers and scatters equal parts only. A warning where a rank's part of fused experts has rows that "
    "grouped products, which read 16 bytes at a time, do not take.",
    "SP203": "Between the edges of a block each rank computes on its part: what colwise linears give in parts, a "
    "rowwise one takes. A linear left whole, or cut the other way, gives wrong numbers, often without an error.",
    "SP204": "A conversion has to start from the layout that is there and to end in the one that is wanted next. "
    "Otherwise activations or gradients come out too large, cut wrongly, or sent twice.",
    "SP205": "Tied weights are one parameter, which can lie in one way only.",
    "SP206": "Replicas of a parameter stay equal only if their gradient is complete on every rank, or summed where it "
    "is not. Which of the two holds follows from where the module stands.",
    "SP207": "Correct, but the same activation is sent several times. A block around the siblings sends it once.",
    "SP208": "A norm over the whole projection, or a weight for each head, needs the entries of this rank's heads "
    "only, and its statistics may need the other ranks'. No style does that yet.",
    "SP209": "Right as long as the ranks of a tp group draw the same random numbers, which `torch.manual_seed` with "
    "the data-parallel rank gives.",
    "SP210": "The number of heads of a rank is that of its activations; attention that reshapes by the number of all "
    "heads mixes tokens up in silence, or crashes.",
    "SP211": "Right, and sometimes meant: it is said, and fails nothing.",
    "SP212": "Sharded logits and gathered logits exclude each other, and a loss takes one or the other.",
    "SP213": "torch reduces gradients in the dtype of the parameters in the forward, unless it is told otherwise.",
    "SP214": "A packed weight is cut section by section, and modules read their share of what they count: the names "
    "that a rule gives must be there, and sections fill the weight.",
    "SP215": "With more tp ranks than KV heads neighbours share a head and gather its keys and values in each forward.",
    "SP301": "Axes are known by name.",
    "SP302": "`apply_plan` was called twice on one model. Apply all layers in one call: "
    "`apply_plan(model, [plan, overlay], mesh)`.",
    "SP303": "Ranks were given different plans, models or weights. Load the same weights and the same plan on all.",
    "SP304": "Mixed precision and CPU offload are FSDP2's.",
    "SP305": "`--lock` compares what a plan comes to with what was written down and reviewed: placements, gradients, "
    "collectives, FSDP2 units, bytes. Where the change is meant, write the lock anew and review its difference.",
    "SP401": "The checks pass, and the model raises once the plan is applied: `--dry-run` found out without weights, "
    "`--verify` on a small copy. Mostly a module reshapes by a size that it keeps to itself.",
    "SP402": "`--dry-run` counts what a step sends and compares it with the compiled plan. A module whose edges the "
    "plan converts runs more or less often than once in a step: what a step costs is then not what the plan says.",
    "SP403": "`--verify` ran a small model of the same architecture on local processes: its activations are not the "
    "unsharded model's. What no check sees: code between the modules that looks across what is cut.",
    "SP404": "`--verify` again: logits and loss are exact, and training would still go wrong.",
    "SP901": "The model is not one of the shipped ones, not a `config.json`, or its class cannot be imported or built.",
    "SP903": "`--verify` needs a small model of the same architecture. It makes one from a transformers configuration.",
    "SP902": "Without a model and a mesh, only the file itself can be checked. Exit code 0, and the note says so.",
    "SP904": "A dry run has shapes and no values: it cannot follow a forward that asks for one. Nor can it run in a "
    "process that belongs to a process group.",
}


def text() -> str:
    """The document."""
    parts = [INTRODUCTION]
    for digit, heading in GROUPS.items():
        parts.append(f"## {heading}\n")
        parts += [_section(code) for code in CODES if code[2] == digit]
    return "\n".join(parts)


def _section(code: str) -> str:
    examples = [_example(plan) for plan in broken_plans() if plan.stem.split("-")[0] == code]
    none = ["No plan file triggers it: `apply_plan` raises it.\n"]
    return "\n".join([f"### {code}: {CODES[code]}\n", f"{MEANING[code]}\n", *(examples or none)])


def _example(plan: Path) -> str:
    said = arguments(plan)
    source = plan.read_text(encoding="utf-8")
    output = plan.with_suffix(".txt").read_text(encoding="utf-8")
    output = output.replace(str(plan.relative_to(ROOT)), "plan.yaml").replace(f"'{plan.stem}'", "'plan'")
    call = " ".join(["plan-compile --check plan.yaml", *said])
    beside = f"{plan.parent.relative_to(ROOT)}/"  # of a lock, which is named as it is found from the plan's folder
    source, call, output = (text.replace(beside, "") for text in (source, call, output))
    return f"```yaml\n{source}```\n\n```console\n$ {call}\n{output}```\n"
