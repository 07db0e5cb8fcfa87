"""What a check looks at, and how it speaks of many modules at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardplan.checks.faulty import FaultyRules
from shardplan.checks.groups import Group, find_groups
from shardplan.diagnostics import Location
from shardplan.kv_heads import SharedHeads, shared_heads
from shardplan.mesh import MeshSpec
from shardplan.plan import Recompute, Rule, Unit
from shardplan.residual import ResidualStream
from shardplan.resolved import ResolvedPlan


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

    @cached_property
    def shared_heads(self) -> dict[str, SharedHeads]:
        """Attention modules and their projections whose KV heads are fewer than the ranks of tp: see `kv_heads`."""
        return shared_heads(self.resolved, self.mesh.tp)

    @cached_property
    def order(self) -> dict[str, int]:
        """The place of each module in the order of definition."""
        return {module.fqn: number for number, module in enumerate(self.resolved.modules)}

    def explained(self, fqn: str) -> bool:
        """Whether a faulty rule, which is reported as such, leaves nothing more to say of a module or parameter."""
        return self.faulty.explains(fqn)

    def inherited(self, line: Rule | Unit | Recompute) -> bool:
        """Whether a line was written for other models, too, below the plan that is asked about."""
        return line.layer.rank != self.resolved.plan.rank

    def where(self, *rules: Rule | None) -> Location:
        """The line of the rule from the highest layer, the first among equals; the plan as a whole where none is.

        Of several rules that make a fault together, the upper one was written in sight of the lower ones.
        """
        known = [rule for rule in rules if rule is not None]
        return max(known, key=lambda rule: rule.layer.rank).where if known else self.resolved.plan.where

    def see(self, *rules: Rule | None) -> str:
        """The first of the rules that lies below the one that `where` names, to end a message with."""
        known = [rule for rule in rules if rule is not None]
        below = (rule for rule in known if rule.layer.rank < max(other.layer.rank for other in known))
        return next((f" (see {rule.where})" for rule in below), "")

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


def few(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = len(names) - 3
    return listed([*names[:3], *([f"{more} more"] if more > 0 else [])])


def size(nbytes: int) -> str:
    """Bytes for people: ``1.5 GiB``."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
