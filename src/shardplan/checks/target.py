"""What a check looks at, and how it speaks of many modules at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from shardplan.mesh import MeshSpec
from shardplan.residual import ResidualStream
from shardplan.resolve import ResolvedPlan


@dataclass(frozen=True)
class Target:
    """A resolved plan, the mesh it is for and the mode it is checked in."""

    resolved: ResolvedPlan
    mesh: MeshSpec
    sequence_parallel: bool

    @cached_property
    def stream(self) -> ResidualStream:
        return ResidualStream(self.resolved)


def general(fqn: str) -> str:
    """``model.layers.3.mlp`` as ``model.layers.*.mlp``: what a fault has in common over layers."""
    return ".".join("*" if token.isdigit() else token for token in fqn.split("."))


def count(number: int, noun: str) -> str:
    """``1 module``, ``2 modules``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(nbytes: int) -> str:
    """Bytes for people: ``1.5 GiB``."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The names that were probably meant, best first."""
    return difflib.get_close_matches(name, list(dict.fromkeys(known)), n=limit, cutoff=0.5)
