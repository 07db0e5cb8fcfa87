"""A plan file as a typed ``Plan``: every rule knows the line and the layer that it came from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardplan.diagnostics import Diagnostic, Location, PlanError
from shardplan.document import PlanFile, RuleOptions
from shardplan.layouts import Conversion, parse_conversion
from shardplan.mesh import parse_mesh
from shardplan.patterns import Pattern, parse_pattern
from shardplan.plan import NULL, Layer, MixedPrecision, Plan, Recompute, Reference, Rule, Unit
from shardplan.resources import plans_folder, shipped_plans
from shardplan.sections import Section
from shardplan.source import KeyPath, Source, read_source, shown
from shardplan.validate import closest, validate


def load_plan(source: str | Path | Plan) -> Plan:
    """Read one plan file. Its ``extends`` stays unresolved: see ``resolve_layers``.

    Args:
        source: a path, the name of a shipped plan, or a ``Plan``, which is returned as it is. Text counts as a name
            unless it has a folder or a suffix.

    Raises:
        PlanError: with every finding of the file, SP001 to SP012 and SP301.
    """
    if isinstance(source, Plan):
        return source
    path = find_plan(source)
    document = read_source(path)
    checked = validate(document)
    findings = list(document.findings)
    if isinstance(checked, PlanFile):
        plan, more = _Build(document, _layer(path)).plan(checked)
        findings += more
        if not findings:
            return plan
    else:
        findings += checked
    raise PlanError(sorted(findings, key=lambda finding: finding.where or Location(document.file)))


def find_plan(source: str | Path, beside: Path | None = None) -> Path:
    """The file that a path or the name of a shipped plan means.

    Args:
        source: as for ``load_plan``.
        beside: the folder that a relative path starts from; the working directory without it.

    Raises:
        PlanError: SP001, a name that is not shipped.
    """
    if not _is_name(source):
        path = Path(source)
        return beside / path if beside else path
    shipped = shipped_plans()
    if (found := shipped.get(str(source))) is not None:
        return found
    folder = plans_folder()
    hint = closest(str(source), list(shipped)) or "a file of your own needs its folder or suffix: ./plan.yaml"
    expected = f"one of {', '.join(shipped)}" if shipped else f"a plan in {shown(folder)}, which has none"
    raise PlanError([Diagnostic("SP001", f"no shipped plan is named '{source}'", None, str(source), expected, hint)])


def _is_name(source: str | Path) -> bool:
    text = str(source)
    return isinstance(source, str) and os.sep not in text and "/" not in text and not Path(text).suffix


def _layer(path: Path) -> Layer:
    shipped = path.resolve().parent == plans_folder().resolve()
    return Layer(0, "shipped" if shipped else "user", path.stem)


class _Build:
    """Turns a checked file into a ``Plan``, collecting what only its parts can tell: patterns, meshes, layers."""

    def __init__(self, source: Source, layer: Layer) -> None:
        self.source = source
        self.layer = layer
        self.findings: list[Diagnostic] = []

    def plan(self, file: PlanFile) -> tuple[Plan, list[Diagnostic]]:
        roots = (file.root,) if isinstance(file.root, str) else tuple(file.root or ())
        plan = Plan(
            name=self.layer.name,
            where=Location(self.source.file),
            architectures=tuple(file.architectures or ()),
            roots=roots,
            rules=tuple(self._rules(file)),
            units=tuple(self._units(file)),
            root_reshard=file.fsdp.root.reshard,
            recompute=None if file.recompute is None else tuple(self._recompute(file.recompute)),
            sequence_parallel=file.sequence_parallel,
            logits=file.logits,
            mixed_precision=_mixed_precision(file),
            cpu_offload=file.cpu_offload,
            reference=self._reference(file),
            extends=file.extends,
            extends_where=self.source.locate(("extends",)) if file.extends else None,
            fallback=file.fallback,
            over_hf=file.extends == "hf",
        )
        return plan, self.findings

    def _rules(self, file: PlanFile) -> Iterable[Rule]:
        for text, value in file.rules.items():
            path = ("rules", text)
            if (pattern := self._pattern(text, path)) is None:
                continue
            where = self.source.locate(path)
            if isinstance(value, RuleOptions):
                yield Rule(pattern, value.style, where, self.layer, **rule_options(value))
            else:
                yield Rule(pattern, NULL if value is None else value, where, self.layer)

    def _units(self, file: PlanFile) -> Iterable[Unit]:
        for text, options in file.fsdp.units.items():
            path = ("fsdp", "units", text)
            if (pattern := self._pattern(text, path)) is not None:
                yield Unit(pattern, self.source.locate(path), self.layer, options.reshard)

    def _recompute(self, texts: list[str]) -> Iterable[Recompute]:
        for index, text in enumerate(texts):
            path = ("recompute", index)
            if (pattern := self._pattern(text, path)) is not None:
                yield Recompute(pattern, self.source.locate(path), self.layer)

    def _reference(self, file: PlanFile) -> Reference:
        for index, text in enumerate(file.reference.meshes):
            where = self.source.locate(("reference", "meshes", index))
            try:
                parse_mesh(text)
            except PlanError as error:
                self.findings += [replace(finding, where=where) for finding in error.diagnostics]
        models = tuple(file.reference.models)
        places = tuple(self.source.locate(("reference", "models", index)) for index in range(len(models)))
        return Reference(models, tuple(file.reference.meshes), places)

    def _pattern(self, text: str, path: KeyPath) -> Pattern | None:
        try:
            return parse_pattern(text)
        except ValueError as error:
            where = self.source.locate(path)
            self.findings.append(Diagnostic("SP009", f"'{text}' is no pattern: {error}", where=where, subject=text))
            return None


def rule_options(stated: RuleOptions) -> dict[str, Any]:
    """What a rule's mapping states beside its style, as arguments of `Rule`."""
    sections = (section for entry in stated.sections or () for section in entry.items())
    return {
        "input": _conversion(stated.input),
        "output": _conversion(stated.output),
        "dim": stated.dim,
        "sections": tuple(Section(name, size) for name, size in sections),
        "local_sizes": tuple(stated.local_sizes or ()),
    }


def _conversion(text: str | None) -> Conversion | None:
    return None if text is None else parse_conversion(text)


def _mixed_precision(file: PlanFile) -> MixedPrecision | None:
    stated = file.mixed_precision
    return None if stated is None else MixedPrecision(stated.param, stated.reduce, stated.output)
