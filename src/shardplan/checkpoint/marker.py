"""The file that says of a checkpoint that it is whole: its step, its plan and mesh, and the size of every file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shardplan.agreement import fingerprint
from shardplan.checkpoint.together import CheckpointError
from shardplan.compiled import CompiledPlan

MARKER = "shardplan.json"
PREFIX = "step-"  # of a checkpoint's folder
MOST_NAMED = 5  # parameters that a message lists


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What of a plan is the same on every mesh.

    Attributes:
        fingerprint: of all of it.
        placements: of each parameter: its placement, and the sections of a packed one.
        settings: the rest, by name.
    """

    name: str
    fingerprint: str
    placements: dict[str, str]
    settings: dict[str, str]

    @classmethod
    def of(cls, compiled: CompiledPlan) -> PlanRecord:
        placements = {
            parameter.fqn: " ".join([str(parameter.placement), *(f"{s.name}:{s.length}" for s in parameter.sections)])
            for module in compiled.modules
            for parameter in module.parameters
        }
        settings = {
            "styles": f"{fingerprint([(module.fqn, module.style) for module in compiled.modules]):x}",
            "units": f"{fingerprint((compiled.units, compiled.root_reshard)):x}",
            "sequence parallel": str(compiled.sequence_parallel),
            "recompute": f"{fingerprint(compiled.recompute):x}",
            "mixed precision": str(compiled.mixed_precision),
            "offload": str(compiled.cpu_offload),
        }
        return cls(compiled.name, f"{fingerprint((placements, settings)):016x}", placements, settings)

    def changes(self, other: PlanRecord) -> tuple[str, ...]:
        """What is different under ``other``, in words; empty for the same plan."""
        if self.fingerprint == other.fingerprint:
            return ()
        names = [n for n in self.placements if self.placements[n] != other.placements.get(n, "")]
        placed = [f"{name}: {self.placements[name]} -> {other.placements.get(name, 'none')}" for name in names]
        more = [f"{len(placed) - MOST_NAMED} more parameters"] if len(placed) > MOST_NAMED else []
        settings = [key for key in self.settings if self.settings[key] != other.settings.get(key)]
        return (*placed[:MOST_NAMED], *more, *settings)


@dataclass(frozen=True, slots=True)
class Marker:
    """See above. ``files``: size in bytes by name."""

    step: int
    mesh: str
    world_size: int
    plan: PlanRecord
    files: dict[str, int]

    def write(self, folder: Path) -> None:
        (folder / MARKER).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def files_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MARKER}


def read_marker(folder: Path) -> Marker:
    """
    Raises:
        CheckpointError: it is not there or not readable; a file is missing or of another size.
    """
    try:
        values = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        marker = Marker(**{**values, "plan": PlanRecord(**values["plan"])})
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no {MARKER}: it is no checkpoint, or one that was not finished"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MARKER} cannot be read: {error!r}") from error
    found = files_of(folder)
    for name, size in marker.files.items():
        if name not in found:
            raise CheckpointError(f"{folder / name} is missing")
        if found[name] != size:
            raise CheckpointError(f"{folder / name} has {found[name]} bytes of {size}")
    return marker
