"""Colours for people at a terminal, and for nobody else."""

from __future__ import annotations

import os

import click

from shardplan.diagnostics import Severity

COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def paint(text: str, severity: Severity) -> str:
    """Text in its severity's colour; `click.echo` takes the colour out again where stdout is no terminal.

    ``NO_COLOR`` set to anything (https://no-color.org) keeps it plain, too.
    """
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=COLOURS[severity], bold=True)
