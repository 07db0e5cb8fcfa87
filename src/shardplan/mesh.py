"""A device mesh as named axes and sizes, without devices: what each axis is for, and which meshes cannot be used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shardplan.diagnostics import Diagnostic, PlanError

TP, CP, REPLICATE = "tp", "cp", "dp_replicate"
SHARDING = ("dp", "fsdp", "dp_shard")  # three names for one thing
KNOWN = (TP, *SHARDING, REPLICATE, CP)

_AXIS = re.compile(r"([A-Za-z_]\w*)=(-?[0-9]{1,9})", re.ASCII)
_ALLOWED = "tp, one of dp, fsdp, dp_shard, beside it dp_replicate and cp"


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A usable mesh: axes in mesh order, as given. Build it with ``parse_mesh`` or ``mesh_spec``, which check it."""

    axes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return prod(size for _, size in self.axes)

    @property
    def tp(self) -> int:
        """The tensor parallel degree; 1 without the axis."""
        return self._size_of(TP)

    @property
    def has_tp(self) -> bool:
        """Whether anything is split over tp: a tp axis of size 1 is ignored."""
        return self.tp > 1

    @property
    def has_dp(self) -> bool:
        """Whether FSDP2 has an axis to shard over; one of size 1 counts."""
        return any(name in SHARDING for name, _ in self.axes)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that FSDP2 shards over, flattened into one; in mesh order."""
        return tuple(name for name, size in self.axes if name in SHARDING or (name == CP and size > 1))

    @property
    def replicate_axis(self) -> str | None:
        """The axis over which FSDP2 keeps replicas (HSDP)."""
        return REPLICATE if self._size_of(REPLICATE) > 1 else None

    def _size_of(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)


def parse_mesh(text: str) -> MeshSpec:
    """Read ``dp=2,tp=4``.

    Raises:
        PlanError: SP301, not of that form or not usable.
    """
    matches = [(part.strip(), _AXIS.fullmatch(part.strip())) for part in text.split(",")]
    wrong = [part for part, match in matches if match is None]
    if wrong:
        raise PlanError([_refusal(f"'{part}' in mesh '{text}' is not an axis and its size", text) for part in wrong])
    axes = [(match[1], int(match[2])) for _, match in matches if match]
    return _checked(axes)


def mesh_spec(names: Sequence[str] | None, shape: Sequence[int]) -> MeshSpec:
    """Describe a ``DeviceMesh`` by its ``mesh_dim_names`` and ``shape``.

    Raises:
        PlanError: SP301, unnamed or not usable.
    """
    if names is None:
        problem = f"the mesh of shape {tuple(shape)} has no axis names"
        hint = "pass mesh_dim_names=('dp', 'tp') to init_device_mesh"
        raise PlanError([_refusal(problem, str(tuple(shape)), hint)])
    return _checked(list(zip(names, shape, strict=True)))


def _checked(axes: list[tuple[str, int]]) -> MeshSpec:
    spec = MeshSpec(tuple(axes))
    problems = [_refusal(problem, str(spec), hint) for problem, hint in _problems(spec)]
    if problems:
        raise PlanError(problems)
    return spec


def _problems(spec: MeshSpec) -> Iterator[tuple[str, str]]:
    """What is wrong with a mesh, each with a way out."""
    names = [name for name, _ in spec.axes]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield f"axis '{name}' is given twice in mesh '{spec}'", "give each axis once"
    for name, size in spec.axes:
        if size < 1:
            yield f"axis '{name}' has size {size} in mesh '{spec}'", "every axis has at least one rank"
        elif name not in KNOWN and size > 1:
            yield f"axis '{name}' of size {size} in mesh '{spec}' is not one that a plan uses", _unknown_axis_hint(name)
    yield from _dp_problems(spec, names)
    yield from _order_problems(spec)


def _order_problems(spec: MeshSpec) -> Iterator[tuple[str, str]]:
    """FSDP2 shards what tp has split, so its axes stand before tp; replicas are outermost."""
    names = [name for name, size in spec.axes if name in KNOWN and (size > 1 or name in SHARDING)]
    wanted = sorted(names, key=lambda name: (name == TP) - (name == REPLICATE))
    if names != wanted:
        yield (
            f"the axes of mesh '{spec}' stand in an order in which FSDP2's parameters cannot be gathered",
            f"order them {', '.join(wanted)}",
        )


def _dp_problems(spec: MeshSpec, names: list[str]) -> Iterator[tuple[str, str]]:
    given = [name for name in SHARDING if name in names]
    if len(given) > 1:
        yield (
            f"mesh '{spec}' has {' and '.join(given)}, which are names for the same axis",
            "keep one; replicas of it go on dp_replicate",
        )
    sizes = dict(spec.axes)
    if given:
        return
    if TP not in names and sizes.get(CP, 1) == sizes.get(REPLICATE, 1) == 1:
        yield f"mesh '{spec}' has neither a tp nor a dp axis: nothing to shard over", "name the axes tp and dp"
    if sizes.get(CP, 1) > 1:
        yield f"mesh '{spec}' has cp but no dp axis to flatten it into", "add dp=1"
    if sizes.get(REPLICATE, 1) > 1:
        # fully_shard takes a 1-D mesh that shards, or a 2-D mesh that replicates over dim 0 and shards over dim 1.
        yield (
            f"mesh '{spec}' has dp_replicate but no dp axis: FSDP2 replicates only what it also shards",
            f"add dp=1 to keep whole replicas, or name the axis dp to shard over {sizes[REPLICATE]} ranks",
        )


def _unknown_axis_hint(name: str) -> str:
    if name == "pp":
        return "split the model into stages first and apply the plan to each with its mesh without pp"
    return "pass the submesh without it: mesh['dp', 'tp']"


def _refusal(problem: str, subject: str, hint: str = "write it as dp=2,tp=4") -> Diagnostic:
    return Diagnostic("SP301", problem, subject=subject, expected=f"axes among {_ALLOWED}", hint=hint)
