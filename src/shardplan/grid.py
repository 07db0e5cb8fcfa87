"""Tables for people, in plain characters that any encoding and any log has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def grid_lines(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str], width: int | None
) -> list[str]:
    """The lines of a table.

    Args:
        headings: one for each column.
        rows: one text for each column.
        numbers: the headings whose columns are set to the right.
        width: where cells fold, in characters; None lets them run.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Not markup: `[shipped]` and `[0-3]` are text.
    console = Console(width=width or 400, markup=False, emoji=False, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip().replace("─", "-") for line in captured.get().splitlines()]  # any encoding has a dash
