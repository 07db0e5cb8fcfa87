"""What the sweep finds of each type of model, and the file that keeps it between passes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXACT = "exact"


@dataclass(frozen=True)
class Row:
    """One type of model: what came of its plan in each mode, and how much of it is cut.

    Attributes:
        tp, sp: ``exact``; ``refused: ...`` by the checks; ``raises: ...`` or ``WRONG: ...`` though they let it pass; ""
            where that pass has not been made.
        body: percent of the parameters beside embedding and head that are cut.
        calls, hf_calls: collectives over tp for a forward and a backward, ours and those that transformers' own styles
            make, on the default configuration.
        hf: what transformers' own tensor parallelism gives: ``exact`` or one of `sweep_hf.KINDS`; "" likewise.
        hf_body: percent of the body that its plan cuts.
        flags: TP and SP verdict by ``field=value``, for the booleans that change the model; None likewise.
    """

    type: str
    model: str = ""
    tp: str = ""
    sp: str = ""
    body: float = 0.0
    calls: int = 0
    hf_calls: int = 0
    seconds: float = 0.0
    hf: str = ""
    hf_body: float = 0.0
    flags: dict[str, tuple[str, str]] | None = None


def read_record(path: Path | None) -> dict[str, Row]:
    """Rows by type; a later line of the file counts for more."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {row["type"]: _row(row) for row in map(json.loads, lines)}


def _row(fields: dict[str, Any]) -> Row:
    """JSON has lists alone."""
    flags = fields.get("flags")
    return Row(**{**fields, "flags": flags and {name: (tp, sp) for name, (tp, sp) in flags.items()}})


def record(path: Path, row: Row) -> None:
    """Add a row to the file: one JSON object a line."""
    with path.open("a") as file:
        print(json.dumps(asdict(row)), file=file)
