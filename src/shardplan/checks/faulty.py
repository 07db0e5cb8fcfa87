"""Rules that come to nothing, and what they were meant for: other checks wait until these rules are mended.

They match nothing, name an unknown style, split what cannot be split, or contradict one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardplan.checks.names import general, last, likeness, nearest
from shardplan.diagnostics import Diagnostic
from shardplan.globs import path_regex
from shardplan.inventory import ancestors
from shardplan.plan import NULL, Rule
from shardplan.residual import input_conversion, output_conversion
from shardplan.resolved import Match, Matched, ResolvedModule, ResolvedPlan
from shardplan.styles import Style


@dataclass(frozen=True, slots=True)
class Dead:
    """An alternative of a rule that matches nothing.

    Attributes:
        elsewhere: fqns by the prefix under which the same path exists; empty when it exists nowhere.
        near: general names like the written one, the best first.
        left: the modules of the best of these names, where no rule speaks of them.
    """

    rule: Rule
    match: Match
    elsewhere: dict[str, tuple[str, ...]]
    near: tuple[str, ...]
    left: tuple[str, ...]


class FaultyRules:
    """What `check_styles` and `check_dead_rules` report, and the modules that are left without a rule for it."""

    def __init__(self, resolved: ResolvedPlan) -> None:
        self._resolved = resolved

    @cached_property
    def unknown(self) -> tuple[Matched[Rule], ...]:
        """Rules that name a style nobody knows."""
        return tuple(m for m in self._resolved.rules if _names_unknown_style(m.line, self._resolved.styles))

    @cached_property
    def dead(self) -> tuple[Dead, ...]:
        """Alternatives that match nothing and that the plan can mend: its own, or under another root."""
        return tuple(dead for dead in self._all_dead if self._is_own(dead) or self._under_wrong_root(dead))

    @cached_property
    def inherited(self) -> tuple[Dead, ...]:
        """The same of the layers below, which whoever wrote the upper one cannot mend. They explain nothing."""
        return tuple(dead for dead in self._all_dead if dead not in self.dead)

    def _is_own(self, dead: Dead) -> bool:
        return dead.rule.layer.rank == self._resolved.plan.rank

    def _under_wrong_root(self, dead: Dead) -> bool:
        return self._root_is_wrong and self.prefix in dead.elsewhere

    @cached_property
    def _root_is_wrong(self) -> bool:
        """Whether no pattern with a leading dot matches anything: `root` is then at fault, not the patterns."""
        return not any(
            match.fqns
            for matched in self._resolved.rules
            for written, match in zip(matched.line.pattern.alternatives, matched.matches, strict=True)
            if written.relative
        )

    @cached_property
    def _all_dead(self) -> tuple[Dead, ...]:
        return tuple(
            self._dead(matched, index)
            for matched in self._resolved.rules
            if not matched.line.pattern.optional
            for index, match in enumerate(matched.matches)
            if not match.fqns and not is_answered(self._resolved.rules, matched, match)
        )

    @cached_property
    def prefix(self) -> str | None:
        """Where several dead rules would all match: a root that the plan should have named."""
        dead = (dead for dead in self._all_dead if self._root_is_wrong or self._is_own(dead))
        prefixes = Counter(prefix for entry in dead for prefix in entry.elsewhere)
        best = prefixes.most_common(1)
        return best[0][0] if best and best[0][1] > 1 else None

    @cached_property
    def unfit(self) -> tuple[ResolvedModule, ...]:
        """Modules of a kind that their style cannot split."""
        return tuple(module for module in self._of_other_kinds if module not in self.misnamed)

    @cached_property
    def misnamed(self) -> tuple[ResolvedModule, ...]:
        """Modules whose style is meant for another kind, but does here what a style for theirs does."""
        return tuple(
            module
            for module in self._of_other_kinds
            if any(_does_the_same(module, row) for row in self._resolved.styles.values())
        )

    @cached_property
    def _of_other_kinds(self) -> tuple[ResolvedModule, ...]:
        return tuple(
            module
            for module in self._resolved.modules
            if module.style is not None and module.style.kinds and module.info.kind not in module.style.kinds
        )

    @cached_property
    def rules(self) -> frozenset[int]:
        """Identities of the rules that match nothing or whose style is unknown."""
        return frozenset(id(rule) for rule in (*(m.line for m in self.unknown), *(d.rule for d in self.dead)))

    def explains(self, fqn: str) -> bool:
        """Whether a faulty rule was probably meant for a module or parameter, or for one around it."""
        return not self._meant.isdisjoint((fqn, *ancestors(fqn)))

    @cached_property
    def _meant(self) -> frozenset[str]:
        unknown = (fqn for matched in self.unknown for fqn in matched.fqns)
        unfit = (module.fqn for module in self.unfit)
        dead = (fqn for entry in self.dead for fqn in self._meant_by(entry))
        return frozenset((*unknown, *unfit, *dead, *self._contested()))

    def _meant_by(self, dead: Dead) -> tuple[str, ...]:
        if self.prefix in dead.elsewhere:
            return dead.elsewhere[self.prefix]
        return next(iter(dead.elsewhere.values()), dead.left)

    def _contested(self) -> Iterator[str]:
        """What two rules of equal rank both claim."""
        matched = {id(entry.line): set(entry.fqns) for entry in self._resolved.rules}
        for tie in self._resolved.ties:
            yield from matched[id(tie.first)] & matched[id(tie.second)]

    @cached_property
    def spoken(self) -> frozenset[str]:
        """Names that some rule matches, and not only one that fills."""
        filled = self._resolved.plan.filled
        written = (matched for matched in self._resolved.rules if not (filled and matched.line.of_hf))
        return frozenset(fqn for matched in written for fqn in matched.fqns)

    @cached_property
    def spoken_around(self) -> frozenset[str]:
        """What some rule matches or was meant for, and everything around it."""
        spoken = self.spoken | self._meant
        return spoken | {above for fqn in spoken for above in ancestors(fqn)}

    @cached_property
    def _by_general_name(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for fqn in self._resolved.by_fqn:
            if fqn:
                names.setdefault(general(fqn), []).append(fqn)
        return names

    def near(self, match: Match) -> tuple[str, ...]:
        """General names of modules like what a dead pattern says; those on which no rule speaks come first.

        Among the alike, the same name elsewhere (``feed_forward.up_proj`` for ``mlp.up_proj``) comes before another.
        """
        scores = {
            name: likeness(match.alternative.tokens, name) + 0.15 * (not self.spoken.intersection(fqns))
            for name, fqns in self._by_general_name.items()
        }
        same = {name: 0.1 * (last(name) == match.alternative.tokens[-1]) for name in scores}
        ranked = sorted((name for name in scores if scores[name] > 0.7), key=lambda name: -scores[name] - same[name])
        return tuple(ranked[:3])

    def _dead(self, matched: Matched[Rule], index: int) -> Dead:
        written, match = matched.line.pattern.alternatives[index], matched.matches[index]
        elsewhere = dict(self.elsewhere(written.tokens, relative=written.relative))
        near = self.near(match)
        left = [fqn for fqn in self._by_general_name[near[0]] if fqn not in self.spoken] if near else ()
        return Dead(matched.line, match, elsewhere, near, tuple(left))

    def elsewhere(self, tokens: tuple[str, ...], *, relative: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The fqns that end in ``tokens``, by the names before; a full path is also tried without its first name."""
        if "**" in tokens:
            return
        for path in (tokens,) if relative or len(tokens) < 3 else (tokens, tokens[1:]):
            found: dict[str, list[str]] = {}
            pattern = path_regex(("**", *path))
            for fqn in self._resolved.by_fqn:
                prefix = general(".".join(fqn.split(".")[: -len(path)])) if path else ""
                if prefix and pattern.fullmatch(f"{fqn}."):
                    found.setdefault(prefix, []).append(fqn)
            if found:
                yield from ((prefix, tuple(fqns)) for prefix, fqns in found.items())
                return


def _does_the_same(module: ResolvedModule, row: Style) -> bool:
    """Whether ``row`` is for modules of that kind, splits alike, and has the same edges where the module stands."""
    assert module.style is not None
    if module.info.kind not in row.kinds or row.split is not module.style.split:
        return False
    other = replace(module, style=row)
    edges = (input_conversion, output_conversion)
    return all(edge(module) == edge(other) for edge in edges)


def is_answered(lines: Iterable[Matched[Any]], below: Matched[Any], match: Match) -> bool:
    """Whether a line of a higher layer repeats an alternative of one below, whose say is then its own."""
    same = (match.alternative.tokens, match.alternative.classes)
    return any(
        (other.alternative.tokens, other.alternative.classes) == same
        for matched in lines
        if matched.line.layer.rank > below.line.layer.rank
        for other in matched.matches
    )


def unknown_styles(rules: Iterable[Rule], styles: Mapping[str, Style]) -> Iterator[Diagnostic]:
    """SP101 for every rule that names a style nobody knows; needs no model."""
    for rule in rules:
        if not _names_unknown_style(rule, styles):
            continue
        close = nearest(str(rule.style), styles)
        yield Diagnostic(
            "SP101",
            f"unknown style '{rule.style}' for {rule.pattern}",
            where=rule.where,
            subject=str(rule.style),
            expected=f"one of {', '.join(styles)}",
            hint=f"did you mean {' or '.join(close)}?" if close else "a style of your own is registered from Python",
        )


def _names_unknown_style(rule: Rule, styles: Mapping[str, Style]) -> bool:
    return rule.native is None and rule.style not in (None, NULL) and rule.style not in styles
