"""Rules x modules -> one claim each.

A rule speaks directly about what its pattern matches; some styles also claim the parameters of everything below.
Among the rules that speak about a module the higher layer wins, then the more specific pattern; a claim that only
reaches down is compared as if its pattern ended in ``.**``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from shardplan.adapters import adapter_parts
from shardplan.hf.plan import below, hf_plan
from shardplan.inventory import Inventory, ModuleInfo, ParameterInfo, ancestors
from shardplan.patterns import Alternative, Pattern
from shardplan.plan import NULL, Plan, Rule
from shardplan.resolved import Candidate, Match, Matched, ResolvedModule, ResolvedParameter, ResolvedPlan, Tie
from shardplan.styles import EDGES_ONLY, REPLICATED_ON_PURPOSE, STYLES, Split, Style, for_kind


def resolve(plan: Plan, inventory: Inventory, styles: Mapping[str, Style] = STYLES) -> ResolvedPlan:
    """Lay ``plan`` over ``inventory``. Nothing is refused here: what does not fit is kept as data for `check`."""
    if inventory.tp_plan and (plan.over_hf or plan.filled):
        plan = below(plan, hf_plan(inventory))
    root = find_root(plan, inventory)
    names = _names(inventory)
    rules = tuple(Matched(rule, _match(rule.pattern, root, names)) for rule in plan.rules)
    candidates = _candidates(rules, styles, inventory)
    if plan.filled:
        candidates = dict(_without_blocks_around_written(candidates, inventory))
    ties: list[Tie] = []
    resolver = _Resolver(candidates, ties)
    modules = tuple(resolver.module(info) for info in inventory.modules)
    module_names = {fqn: cls for fqn, cls in names.items() if fqn in inventory.by_fqn}
    return ResolvedPlan(
        plan=plan,
        inventory=inventory,
        styles=styles,
        root=root,
        modules=modules,
        rules=rules,
        units=tuple(Matched(unit, _match(unit.pattern, root, module_names)) for unit in plan.units),
        recompute=tuple(Matched(entry, _match(entry.pattern, root, module_names)) for entry in plan.recompute or ()),
        ties=tuple(ties),
    )


def find_root(plan: Plan, inventory: Inventory) -> str | None:
    """What a leading dot stands for: the first root that exists; the model itself where the plan names none."""
    if not plan.roots:
        return ""
    return next((root for root in plan.roots if root in inventory.by_fqn), None)


def _names(inventory: Inventory) -> dict[str, str]:
    """Everything a pattern may match, with the class name that ``@`` looks at: modules, then parameters."""
    names = {module.fqn: module.class_name for module in inventory.modules}
    for module in inventory.modules:
        names.update((parameter.fqn, module.class_name) for parameter in module.parameters)
    return names


def _match(pattern: Pattern, root: str | None, names: Mapping[str, str]) -> tuple[Match, ...]:
    return tuple(_match_alternative(alternative, root, names) for alternative in pattern.alternatives)


def _match_alternative(alternative: Alternative, root: str | None, names: Mapping[str, str]) -> Match:
    if alternative.relative and root is None:
        return Match(alternative, ())
    absolute = alternative.rooted(root or "") if alternative.relative else alternative
    return Match(absolute, tuple(fqn for fqn, class_name in names.items() if absolute.matches(fqn, class_name)))


def _style_of(rule: Rule, styles: Mapping[str, Style]) -> Style | None:
    if rule.native is not None:
        return Style(type(rule.native).__name__, "applied as it stands", subtree=True, native=rule.native)
    if rule.style is None:
        return EDGES_ONLY
    style = REPLICATED_ON_PURPOSE if rule.style == NULL else styles.get(rule.style)
    return style and replace(
        style,
        dim=style.dim if rule.dim is None else rule.dim,
        sections=rule.sections or style.sections,
        local_sizes=tuple(dict.fromkeys((*style.local_sizes, *rule.local_sizes))),
    )


def _candidates(
    rules: Iterable[Matched[Rule]], styles: Mapping[str, Style], inventory: Inventory
) -> dict[str, list[Candidate]]:
    found: dict[str, list[Candidate]] = {}
    for matched in rules:
        style = _style_of(matched.line, styles)
        for match in matched.matches:
            for fqn in match.fqns:
                module = inventory.by_fqn.get(fqn)
                fitting = for_kind(style, module.kind) if style and module else style
                found.setdefault(fqn, []).append(Candidate(matched.line, match.alternative, fitting, direct=True))
                for name, part in (*style.parts, *adapter_parts(style, fqn, inventory)) if style else ():
                    candidate = Candidate(matched.line, match.alternative, part, direct=True, part=True)
                    found.setdefault(f"{fqn}.{name}", []).append(candidate)
    return found


def _without_blocks_around_written(
    candidates: Mapping[str, list[Candidate]], inventory: Inventory
) -> Iterator[tuple[str, list[Candidate]]]:
    """A block of transformers' plan would take over the edges of linears that the user has cut: it fills nothing.

    Where they are written in part only, `check_filled` says so.
    """
    linears = (module.fqn for module in inventory.modules if module.kind.is_linear)
    written = (fqn for fqn in linears if any(_cuts(c) and not c.rule.of_hf for c in candidates.get(fqn, ())))
    around = {above for fqn in written for above in ancestors(fqn)}
    for fqn, found in candidates.items():
        fills_around = (c.rule.of_hf and c.style is not None and c.style.opens_block for c in found)
        kept = [c for c, block in zip(found, fills_around, strict=True) if not (block and fqn in around)]
        yield fqn, kept


def _cuts(candidate: Candidate) -> bool:
    return candidate.style is None or candidate.style.split is not Split.NONE


class _Resolver:
    """Decides module by module, parents first, so that claims from above are at hand."""

    def __init__(self, candidates: Mapping[str, list[Candidate]], ties: list[Tie]) -> None:
        self.direct = candidates
        self.ties = ties
        self.reaching_down: dict[str, tuple[Candidate, ...]] = {}
        self.blocks: dict[str, str | None] = {}

    def module(self, info: ModuleInfo) -> ResolvedModule:
        parent = next(ancestors(info.fqn), None)
        inherited = self.reaching_down.get(parent, ()) if parent is not None else ()
        speakers = self._ranked(info.fqn, inherited)
        parameters = tuple(self._parameter(parameter, speakers) for parameter in info.parameters)
        winner = speakers[0] if speakers and speakers[0].direct else _by_parameters(parameters)
        self.reaching_down[info.fqn] = tuple(
            Candidate(c.rule, c.alternative, c.style, direct=False) for c in speakers if c.style and c.style.subtree
        )
        block = self.blocks.get(parent) if parent is not None else None
        opens = winner is not None and winner.style is not None and winner.style.opens_block
        self.blocks[info.fqn] = info.fqn if opens else block
        return ResolvedModule(
            info=info,
            rule=winner.rule if winner else None,
            style=winner.style if winner else None,
            parameters=parameters,
            block=block,
            speakers=speakers,
            part=winner is not None and winner.part,
        )

    def _parameter(self, info: ParameterInfo, of_module: tuple[Candidate, ...]) -> ResolvedParameter:
        speakers = self._ranked(info.fqn, of_module)
        claim = next((c for c in speakers if c.style is None or c.style.claims), None)
        return ResolvedParameter(info, claim.rule if claim else None, claim.style if claim else None, speakers)

    def _ranked(self, fqn: str, others: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """All that speak about ``fqn``, the winner first; a tie between different sayings is noted."""
        ranked = sorted((*self.direct.get(fqn, ()), *others), key=lambda c: c.precedence, reverse=True)
        if len(ranked) > 1 and _conflict(*ranked[:2]) and not _known(self.ties, ranked[0].rule, ranked[1].rule):
            self.ties.append(Tie(fqn, ranked[0].rule, ranked[1].rule))
        return tuple(ranked)


def _by_parameters(parameters: tuple[ResolvedParameter, ...]) -> Candidate | None:
    """A rule that names every parameter of a module, ``q_proj.*``, and splits them speaks of the module."""
    claims = {id(parameter.claim) for parameter in parameters}
    first = parameters[0].speakers[0] if parameters and parameters[0].speakers else None
    if first is None or not first.direct or first.style is None or first.style.split is Split.NONE:
        return None
    return first if claims == {id(first.rule)} else None


def _conflict(first: Candidate, second: Candidate) -> bool:
    equal = first.precedence == second.precedence and first.direct and second.direct
    return equal and first.rule.says() != second.rule.says()


def _known(ties: Iterable[Tie], first: Rule, second: Rule) -> bool:
    return any({id(tie.first), id(tie.second)} == {id(first), id(second)} for tie in ties)
