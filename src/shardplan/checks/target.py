"""What a check looks at, and how it speaks of many modules at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from shardplan.checks.faulty import FaultyRules
from shardplan.checks.groups import Group, find_groups
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

    @cached_property
    def faulty(self) -> FaultyRules:
        """Rules that come to nothing. What they were meant for is not reported a second time."""
        return FaultyRules(self.resolved)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """What is cut together, as far as its rules are not at fault already."""
        return tuple(find_groups(self.resolved, self.faulty))

    def explained(self, fqn: str) -> bool:
        """Whether a faulty rule, which is reported as such, leaves nothing more to say of a module or parameter."""
        return self.faulty.explains(fqn)

    def spell(self, name: str) -> str:
        """A general name as a rule would write it: relative to the plan's root where it lies below."""
        root = self.resolved.root
        return name.removeprefix(root) if root and name.startswith(f"{root}.") else name


def count(number: int, noun: str) -> str:
    """``1 module``, ``2 modules``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Iterable[str], last: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *others, final = names
    return f"{', '.join(others)} {last} {final}" if others else final


def size(nbytes: int) -> str:
    """Bytes for people: ``1.5 GiB``."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
