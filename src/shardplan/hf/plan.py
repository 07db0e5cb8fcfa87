"""transformers' own plan for a model as one of ours: patterns over all layers, each rule with its origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from shardplan.checks.names import general
from shardplan.diagnostics import Location
from shardplan.hf.derive import Derived, Treatment, derive
from shardplan.inventory import Inventory
from shardplan.patterns import parse_pattern
from shardplan.plan import Layer, Plan, Rule, Unit
from shardplan.ranged import ranged

_DERIVED = " (derived)"
HF, LOWEST = "hf", -1  # below the ranks of all layers that a user names


def hf_plan(inventory: Inventory) -> Plan:
    """What the model's own plan comes to once it is completed; without rules where the model has none."""
    derived = derive(inventory, dict(inventory.tp_plan), dict(inventory.fsdp_plan))
    model = inventory.architectures[0]
    layer = Layer(LOWEST, "hf", HF)
    return Plan(
        name=HF,
        where=Location(f"{model}.tp_plan"),
        rules=(*_rules(inventory, derived, layer), *_foreign(derived, model, layer)),
        units=tuple(_units(inventory, derived, layer)),
        root_reshard=False if derived.units else None,
        unmatched=derived.dead,
    )


def _rules(inventory: Inventory, derived: Derived, layer: Layer) -> Iterator[Rule]:
    model = inventory.architectures[0]
    everything = Counter(map(general, (*inventory.by_fqn, *(p.fqn for p in inventory.parameters))))
    alike: dict[Treatment, list[str]] = {}
    for name, treatment in derived.treatments.items():
        alike.setdefault(treatment, []).append(name)
    for treatment, names in alike.items():
        place = f"{model}.tp_plan[{treatment.source}]" if treatment.source else f"{model}{_DERIVED}"
        for text in _texts(names, everything):
            yield Rule(
                pattern=parse_pattern(text),
                style=treatment.style,
                where=Location(place),
                layer=layer,
                input=treatment.input,
                output=treatment.output,
                dim=treatment.dim,
                sections=treatment.sections,
                local_sizes=treatment.local_sizes,
            )


def is_derived(rule: Rule) -> bool:
    """Whether a rule of this layer completes transformers' plan, and is not one of it."""
    return rule.where.file.endswith(_DERIVED)


def _foreign(derived: Derived, model: str, layer: Layer) -> Iterator[Rule]:
    """Rules with styles that nobody knows: kept, so that the checks speak of them."""
    for key, style in derived.unknown.items():
        if key not in derived.dead:
            yield Rule(parse_pattern(key), style, Location(f"{model}.tp_plan[{key}]"), layer)


def _units(inventory: Inventory, derived: Derived, layer: Layer) -> Iterator[Unit]:
    by_reshard: dict[bool | None, list[str]] = {}
    for fqn, reshard in derived.units.items():
        by_reshard.setdefault(reshard, []).append(fqn)
    everything = Counter(map(general, inventory.by_fqn))
    for reshard, fqns in by_reshard.items():
        for text in _texts(fqns, everything):
            yield Unit(parse_pattern(text), Location(f"{inventory.architectures[0]}{_DERIVED}"), layer, reshard)


def _texts(fqns: Iterable[str], everything: Mapping[str, int]) -> Iterator[str]:
    """General names where they match nothing else, ranges where they would."""
    families: dict[str, list[str]] = {}
    for fqn in fqns:
        families.setdefault(general(fqn), []).append(fqn)
    for name, members in families.items():
        yield from [name] if len(members) == everything[name] else ranged(members)


def below(plan: Plan, lowest: Plan) -> Plan:
    """``plan`` with the rules and units of ``lowest`` under its own; units that only fill, where it has none."""
    return replace(
        plan,
        rules=(*lowest.rules, *plan.rules),
        units=plan.units if plan.filled and plan.units else (*lowest.units, *plan.units),
        unmatched=lowest.unmatched,
        root_reshard=plan.root_reshard if plan.root_reshard is not None else lowest.root_reshard,
    )
