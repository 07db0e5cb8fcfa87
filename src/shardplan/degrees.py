"""The tp degrees that a plan allows on one model and a fixed number of ranks, and why it refuses the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardplan.check import check
from shardplan.checks.target import Target
from shardplan.diagnostics import Diagnostic, errors
from shardplan.mesh import SHARDING, TP, MeshSpec, mesh_spec

LARGEST = 64  # beyond the largest domains in which ranks reach one another faster than over the network


@dataclass(frozen=True, slots=True)
class RefusedDegrees:
    """Degrees that one reason rules out; ``message`` is the first error of the smallest of them."""

    degrees: tuple[int, ...]
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Degrees:
    """Which tp degrees a plan can run with where tp grows as dp shrinks.

    Attributes:
        world: the number of ranks; other axes than tp and dp keep their sizes.
        legal: the degrees without an error.
        refused: the others, as far as they divide the ranks of tp and dp.
    """

    world: int
    legal: tuple[int, ...]
    refused: tuple[RefusedDegrees, ...]


def tp_degrees(target: Target, largest: int = LARGEST) -> Degrees:
    """Check the plan at every tp degree up to ``largest`` that the ranks of the mesh allow."""
    first_errors = {tp: _first_error(target, mesh) for tp, mesh in _meshes(target.mesh, largest).items()}
    return Degrees(
        world=target.mesh.size,
        legal=tuple(tp for tp, error in first_errors.items() if error is None),
        refused=tuple(_by_reason({tp: error for tp, error in first_errors.items() if error is not None})),
    )


def _first_error(target: Target, mesh: MeshSpec) -> Diagnostic | None:
    return next(iter(errors(check(replace(target, mesh=mesh)))), None)


def _meshes(mesh: MeshSpec, largest: int) -> dict[int, MeshSpec]:
    """Meshes of as many ranks by their tp degree, smallest first. A dp or tp axis that is missing takes its place."""
    sizes = dict(mesh.axes)
    dp = next((name for name in SHARDING if name in sizes), None)
    shared = sizes.get(TP, 1) * (sizes[dp] if dp else 1)
    axes = ({} if dp else {SHARDING[0]: 1}) | sizes | {TP: mesh.tp}
    degrees = [tp for tp in range(1, min(shared, largest) + 1) if shared % tp == 0]
    meshes = {tp: axes | {dp or SHARDING[0]: shared // tp, TP: tp} for tp in degrees}
    return {tp: mesh_spec(list(sizes), list(sizes.values())) for tp, sizes in meshes.items()}


def _by_reason(refused: dict[int, Diagnostic]) -> list[RefusedDegrees]:
    """Degrees that are refused for the same things: a message differs in the degree that it names."""
    groups: dict[tuple[str, str], list[int]] = {}
    for tp, error in refused.items():
        groups.setdefault((error.code, error.subject), []).append(tp)
    return [RefusedDegrees(tuple(group), code, refused[group[0]].message) for (code, _), group in groups.items()]
