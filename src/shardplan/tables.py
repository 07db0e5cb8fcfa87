"""A report on a terminal or in a file: tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.target import count, listed, size
from shardplan.coverage import Share, Treatment
from shardplan.degrees import Degrees
from shardplan.grid import grid_lines
from shardplan.report import Report

_HEADINGS = ("rule", "matches", "style", "placement over tp", "whole", "per tp rank", "per rank", "written at")
_NUMBERS = ("matches", "whole", "per tp rank", "per rank")
_NATIVE = Treatment.NATIVE.value  # rare, and worth a line only where it is met


def report_text(report: Report, width: int | None = None) -> str:
    """What each rule did, what is replicated, what is sent over tp, what FSDP2 wraps.

    Args:
        report: what to show.
        width: where lines fold, in characters; None lets them run.
    """
    mode = "sequence parallel" if report.sequence_parallel else "tensor parallel"
    lines = [f"plan {report.plan} on {report.model}, mesh {report.mesh}, {mode}", ""]
    lines += grid_lines(_HEADINGS, _rules(report), _NUMBERS, width)
    lines += ["", *_bytes(report), "", *_collectives(report), "", *_units(report), "", *_degrees(report.degrees)]
    return "\n".join(lines) + "\n"


def _rules(report: Report) -> Iterator[tuple[str, ...]]:
    for row in report.rules:
        sizes = (row.nbytes.whole, row.nbytes.tp_rank, row.nbytes.rank)
        shown = map(size, sizes) if row.parameters else ("", "", "")
        where = f"{row.where} {row.layer}"
        yield row.pattern, str(row.matched), row.style, ", ".join(row.placements), *shown, where


def _bytes(report: Report) -> list[str]:
    whole, per_element = report.nbytes.whole, report.nbytes.whole // report.parameters if report.parameters else 0
    lines = [
        f"parameters: {report.parameters:,} of {per_element} bytes, {size(whole)}: {size(report.nbytes.tp_rank)} per "
        f"tp rank, {size(report.nbytes.rank)} per rank once FSDP2 has cut them, too",
        *(_share(share) for share in report.coverage.treatments if share.parameters or share.treatment != _NATIVE),
    ]
    replicated = [row for row in report.rules if row.replicated]
    lines += ["left whole over tp:"] if replicated else []
    lines += [
        f"  {row.pattern}  {row.style}: {count(row.replicated, 'parameter')}, {size(row.replicated_nbytes)}"
        for row in replicated
    ]
    return lines + [f"tied: {listed(group)} are one parameter" for group in report.ties]


def _share(share: Share) -> str:
    amount = f"{count(share.parameters, 'parameter')}, {size(share.nbytes)}" if share.parameters else "none"
    percents = f": {_percent(share.elements_percent)} of all elements, {_percent(share.nbytes_percent)} of all bytes"
    return f"{share.treatment}: {amount}{percents if share.parameters else ''}"


def _percent(percent: float) -> str:
    """A share is only called nothing or everything where it is."""
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return "> 99.99 %" if 99.99 < percent < 100 else f"{percent:.2f} %"


def _degrees(degrees: Degrees) -> list[str]:
    """What tp may be, then what it may not be and why."""
    lines = [f"tp degrees: {', '.join(map(str, degrees.legal)) or 'none'} (of {degrees.world} ranks)"]
    return lines + [f"  not {', '.join(map(str, no.degrees))}: {no.code}: {no.message}" for no in degrees.refused]


def _collectives(report: Report) -> list[str]:
    lines = ["collectives over tp in one step (without FSDP2's, the loss's, and those of recomputation)"]
    for direction in ("forward", "backward"):
        calls = [entry for entry in report.collectives if entry.direction == direction]
        lines.append(f"  {direction}: {sum(entry.calls for entry in calls)}")
        lines += [f"    {entry.module}  {entry.name} x {entry.calls}" for entry in calls]
    return [*lines, f"  sums of replicated parameters' gradients, one for each FSDP2 unit that has some: {report.sums}"]


def _units(report: Report) -> list[str]:
    units = [f"{name} x {number}" for name, number in report.units]
    lines = [f"FSDP2 units: {', '.join([*units, 'the model around them' if units else 'the model'])}"]
    if report.recompute:
        lines.append("recomputed: " + ", ".join(f"{name} x {number}" for name, number in report.recompute))
    return lines
