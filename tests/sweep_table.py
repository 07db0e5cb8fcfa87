"""docs/coverage.md: written from the rows of the sweep, and read back by its tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import transformers

from refusals import REVIEWED
from sweep_rows import EXACT, Row

DOCUMENT = Path(__file__).parents[1] / "docs" / "coverage.md"
INTRODUCTION = f"""# What becomes of transformers' own plans

<!-- written by tests/sweep.py -->

Each row is a causal language model of transformers {transformers.__version__} whose configuration has a `tp_plan`. The
plan is taken as `extends: hf` takes it and completed; the model is made small by `--verify`'s shrinker, given random
weights, norms and routers, and compared on two local ranks with the unsharded one: logits, every gradient, replicas,
the gradient norm over two micro-batches, parameters after AdamW steps, in tensor parallel (TP) and sequence parallel
(SP). *Body* is the share of the parameters beside embedding and head that is cut. *Calls* are collectives over tp in
one forward and backward of the default configuration in TP, ours and, by the meaning of its styles, transformers' own.
*transformers' own TP* is the same small model loaded by two ranks with `from_pretrained(..., distributed_config=...)`,
against the same folder loaded whole, with the same tolerances: logits and all gradients of one micro-batch, then the
gradients of two.
"""


HEADINGS = ("type", "class", "TP", "SP", "body", "calls", "transformers' own TP", "its body", "its calls")


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def table(rows: Iterable[Row], total: int) -> str:
    """The document: of ``total`` types those that were looked at."""
    listed = sorted(rows, key=lambda row: row.type)
    built = [row for row in listed if row.model]
    lines = [INTRODUCTION]
    if len(listed) < total:
        lines.append(f"Looked at so far: {len(listed)} of {total} types.\n")
    for mode, verdicts in (("TP", [row.tp for row in built]), ("SP", [row.sp for row in built])):
        exact, wrong = verdicts.count(EXACT), sum(verdict.startswith("WRONG") for verdict in verdicts)
        share = 100 * exact / len(verdicts) if verdicts else 0
        lines.append(f"- {mode}: {exact} of {len(verdicts)} exact ({share:.1f} %), {wrong} wrong")
    large = sum(row.body >= MOST for row in built if row.tp == EXACT)
    lines.append(f"- at least 90 % of the body cut: {large} of the {sum(row.tp == EXACT for row in built)} exact in TP")
    lines += [*_of_transformers([row for row in built if row.hf]), ""]
    lines += [_cells(HEADINGS), _cells(["---"] * len(HEADINGS))]
    lines += [_cells(_row_cells(row)) for row in listed]
    lines += _refusals(listed)
    return "\n".join([*lines, *_flags([row for row in listed if row.flags is not None])]) + "\n"


def _refusals(rows: Iterable[Row]) -> Iterator[str]:
    """Why what is refused is refused: a property of the model."""
    refused = [row.type for row in rows if "refused" in (row.tp.partition(":")[0], row.sp.partition(":")[0])]
    if refused:
        yield "\n## Refused, and why\n\nEach refusal was reviewed; its cause is a property of the model.\n"
    for name in refused:
        known = REVIEWED.get(name)
        said = f"{' and '.join(known.modes)}, {known.code}: {known.cause}." if known else "not reviewed."
        yield f"- `{name}`, {said}"


def _flags(rows: list[Row]) -> Iterator[str]:
    """What became of flipped fields; those that are exact in both modes are counted only."""
    flipped = [(row, flag, verdicts) for row in rows for flag, verdicts in (row.flags or {}).items()]
    if not flipped:
        return
    yield (
        f"\n## Fields flipped\n\n"
        f"Each boolean field of the configurations of {len(rows)} types, flipped alone, where that changes modules, "
        f"parameters, ties or\nlogits: {len(flipped)} models, checked and compared as above.\n"
    )
    for mode, of in (("TP", 0), ("SP", 1)):
        kinds = Counter(verdicts[of].partition(":")[0] for _, _, verdicts in flipped)
        yield f"- {mode}: {', '.join(f'{number} {kind}' for kind, number in kinds.most_common())}"
    others = [entry for entry in flipped if set(entry[2]) != {EXACT}]
    if others:
        yield "\n" + _cells(FLAG_HEADINGS)
        yield _cells(["---"] * len(FLAG_HEADINGS))
        yield from (_cells((row.type, flag, *verdicts)) for row, flag, verdicts in others)


FLAG_HEADINGS = ("type", "field", "TP", "SP")
MOST = 90  # percent


def _of_transformers(rows: list[Row]) -> Iterator[str]:
    """How often transformers' own tensor parallelism is right, and how it is wrong."""
    if not rows:
        return
    kinds = Counter(row.hf.partition(":")[0] for row in rows)
    others = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common() if kind != EXACT)
    large = sum(row.hf_body >= MOST for row in rows if row.hf == EXACT)
    yield (
        f"- transformers' own TP: {kinds[EXACT]} of {len(rows)} exact{f', {others}' if others else ''}; "
        f"{large} of its exact ones cut at least 90 % of the body"
    )


def _row_cells(row: Row) -> tuple[str, ...]:
    of_hf = (row.hf or "-", f"{row.hf_body:g} %" if row.hf else "-", str(row.hf_calls))
    return (row.type, row.model, row.tp, row.sp, f"{row.body:g} %", str(row.calls), *of_hf)


def read_table() -> dict[str, tuple[str, str]]:
    """The verdicts of docs/coverage.md by type."""
    return {cells[0]: (cells[2], cells[3]) for cells in _table_rows() if len(cells) > len(FLAG_HEADINGS)}


def read_flags() -> dict[tuple[str, str], tuple[str, str]]:
    """The verdicts of docs/coverage.md by type and flipped field, where they are not exact in both modes."""
    flags = (cells for cells in _table_rows() if len(cells) == len(FLAG_HEADINGS))
    return {(cells[0], cells[1]): (cells[2], cells[3]) for cells in flags}


def _table_rows() -> Iterator[list[str]]:
    for line in DOCUMENT.read_text().splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if line.startswith("| ") and cells[0] not in ("type", "---"):
            yield cells
