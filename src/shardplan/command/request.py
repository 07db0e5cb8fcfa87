"""What the command line asks of each plan, and the situations (model, mesh, mode) that this comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardplan.diagnostics import Diagnostic, PlanError, Severity
from shardplan.findings import Asked
from shardplan.mesh import MeshSpec, parse_mesh
from shardplan.styles import Style

if TYPE_CHECKING:
    from torch import nn

    from shardplan.checks.target import Target
    from shardplan.inventory import Inventory
    from shardplan.plan import Plan


@dataclass(frozen=True, slots=True)
class Situation:
    """A plan on one model (named as ``build_meta_model`` takes it), one mesh and in one mode."""

    model: str
    target: Target
    asked: Asked

    def __str__(self) -> str:
        return f"{self.model} {self.target.mesh} {'SP' if self.target.sequence_parallel else 'TP'}"


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks of each plan; None leaves a question to the plan."""

    overlays: tuple[str, ...]
    model: str | None
    mesh: str | None
    sequence_parallel: bool | None
    styles: Mapping[str, Style]

    def plan(self, name: str) -> Plan:
        """The plan of that name with the overlays on it."""
        from shardplan.merge import read_plan

        return read_plan([name, *(Path(overlay) for overlay in self.overlays)])

    def asked(self, name: str, plan: Plan) -> Asked:
        """The plan of that name, as findings in other files name it."""
        return Asked(" + ".join((name, *self.overlays)), plan.where.file, plan.extends_where or plan.where)

    def models(self, plan: Plan) -> tuple[str, ...]:
        return (self.model,) if self.model is not None else plan.reference.models

    def meshes(self, plan: Plan) -> tuple[MeshSpec, ...]:
        return tuple(map(parse_mesh, (self.mesh,) if self.mesh is not None else plan.reference.meshes))

    def modes(self, plan: Plan) -> tuple[bool, ...]:
        """The mode that was asked for, or both. A plan without a word of the stream has only one."""
        if self.sequence_parallel is not None:
            return (self.sequence_parallel,)
        return (False, True) if plan.speaks_of_stream or plan.sequence_parallel else (False,)

    def mode(self, plan: Plan) -> bool:
        """The one mode of a request that is about one."""
        return bool(plan.sequence_parallel if self.sequence_parallel is None else self.sequence_parallel)

    def situations(self, name: str, plan: Plan) -> Iterator[Situation | PlanError]:
        """Every situation of the plan of that name to look at; in its place the reason why a model cannot be had."""
        from shardplan.checks.target import Target
        from shardplan.resolve import resolve

        for model in self.models(plan):
            try:
                resolved = resolve(plan, self._inventory(model, plan), self.styles)
            except PlanError as refused:
                yield refused
                continue
            for mode in self.modes(plan):
                for mesh in self.meshes(plan):
                    yield Situation(model, Target(resolved, mesh, mode), self.asked(name, plan))

    def first(self, name: str, plan: Plan) -> Situation:
        """The first model and mesh, in the one mode: what is printed where one situation must do.

        Raises:
            PlanError: the model cannot be had.
        """
        from shardplan.checks.target import Target
        from shardplan.resolve import resolve

        model, mesh = self.models(plan)[0], self.meshes(plan)[0]
        resolved = resolve(plan, self._inventory(model, plan), self.styles)
        return Situation(model, Target(resolved, mesh, self.mode(plan)), self.asked(name, plan))

    def _inventory(self, model: str, plan: Plan) -> Inventory:
        """
        Raises:
            PlanError: the model cannot be had; with its place where it is the plan that names it.
        """
        try:
            return inventory_of(model)
        except PlanError as refused:
            if self.model is not None:
                raise
            place = dict(zip(plan.reference.models, plan.reference.places, strict=True))[model]
            raise PlanError([replace(finding, where=place) for finding in refused.diagnostics]) from None

    def missing(self, plan: Plan) -> str:
        """What is not known and without which only the file can be looked at: ``model``, ``mesh``, or nothing."""
        return "model" if not self.models(plan) else "mesh" if not self.meshes(plan) else ""

    def file_only(self, plan: Plan) -> Iterator[Diagnostic]:
        """All that can be said of a plan without a model: unknown styles, and that there is more to check."""
        from shardplan.checks.faulty import unknown_styles

        yield from unknown_styles(plan.rules, self.styles)
        yield Diagnostic(
            "SP902",
            f"only the file was checked: plan '{plan.name}' names no {self.missing(plan)} under `reference`, and none "
            "was given",
            where=plan.where,
            subject=plan.name,
            expected="`reference: {models: [...], meshes: [...]}`",
            hint="pass --model and --mesh, or name them in the plan",
            severity=Severity.NOTE,
        )


@lru_cache(maxsize=8)  # several plans on one model
def inventory_of(model: str) -> Inventory:
    """The inventory of the model that ``--model`` or a plan's ``reference`` names."""
    from shardplan.inventory import take_inventory

    return take_inventory(model_of(model))


@lru_cache(maxsize=8)
def model_of(model: str) -> nn.Module:
    """That model itself, on the meta device."""
    from shardplan.references import build_meta_model

    return build_meta_model(model)
