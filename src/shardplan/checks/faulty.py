"""Rules that come to nothing, because they match nothing or name an unknown style, and what they were meant for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardplan.checks.names import general, likeness, nearest
from shardplan.diagnostics import Diagnostic
from shardplan.globs import path_regex
from shardplan.inventory import ancestors
from shardplan.plan import NULL, Rule
from shardplan.resolve import Match, Matched, ResolvedPlan
from shardplan.styles import Style


@dataclass(frozen=True, slots=True)
class Dead:
    """An alternative of a rule that matches nothing.

    Attributes:
        elsewhere: fqns by the prefix under which the same path exists; empty when it exists nowhere.
        near: general names like the written one, the best first.
        meant: fqns that the rule was probably meant for.
    """

    rule: Rule
    match: Match
    elsewhere: dict[str, tuple[str, ...]]
    near: tuple[str, ...]
    meant: tuple[str, ...]


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
        """Alternatives that match nothing and are not optional."""
        return tuple(
            self._dead(matched, index)
            for matched in self._resolved.rules
            if not matched.line.pattern.optional
            for index, match in enumerate(matched.matches)
            if not match.fqns
        )

    @cached_property
    def prefix(self) -> str | None:
        """Where several dead rules would all match: a root that the plan should have named."""
        prefixes = Counter(prefix for dead in self.dead for prefix in dead.elsewhere)
        best = prefixes.most_common(1)
        return best[0][0] if best and best[0][1] > 1 else None

    @cached_property
    def rules(self) -> frozenset[int]:
        """Identities of the faulty rules."""
        return frozenset(id(rule) for rule in (*(m.line for m in self.unknown), *(d.rule for d in self.dead)))

    @cached_property
    def meant(self) -> frozenset[str]:
        """Modules and parameters that a faulty rule was probably meant for."""
        unknown = (fqn for matched in self.unknown for fqn in matched.fqns)
        return frozenset((*unknown, *(fqn for dead in self.dead for fqn in dead.meant)))

    @cached_property
    def spoken(self) -> frozenset[str]:
        """Names that some rule matches."""
        return frozenset(fqn for matched in self._resolved.rules for fqn in matched.fqns)

    @cached_property
    def spoken_around(self) -> frozenset[str]:
        """What some rule matches, and everything around it."""
        return frozenset((*self.spoken, *(above for fqn in self.spoken for above in ancestors(fqn))))

    @cached_property
    def _by_general_name(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for fqn in self._resolved.by_fqn:
            if fqn:
                names.setdefault(general(fqn), []).append(fqn)
        return names

    def near(self, match: Match) -> tuple[str, ...]:
        """General names of modules like what a dead pattern says; those on which no rule speaks come first."""
        scores = {
            name: likeness(match.alternative.tokens, name) + 0.15 * (not self.spoken.intersection(fqns))
            for name, fqns in self._by_general_name.items()
        }
        ranked = sorted((name for name in scores if scores[name] > 0.7), key=lambda name: -scores[name])
        return tuple(ranked[:3])

    def _dead(self, matched: Matched[Rule], index: int) -> Dead:
        written, match = matched.line.pattern.alternatives[index], matched.matches[index]
        elsewhere = dict(self._elsewhere(written.tokens, relative=written.relative))
        near = self.near(match)
        meant = [fqn for fqns in elsewhere.values() for fqn in fqns]
        if not meant and near:
            meant = [fqn for fqn in self._by_general_name[near[0]] if fqn not in self.spoken]
        return Dead(matched.line, match, elsewhere, near, tuple(meant))

    def _elsewhere(self, tokens: tuple[str, ...], *, relative: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The fqns that end in ``tokens``, by the names before; a full path is also tried without its first name."""
        if "**" in tokens:
            return
        for path in (tokens,) if relative or len(tokens) < 3 else (tokens, tokens[1:]):
            found: dict[str, list[str]] = {}
            pattern = path_regex(("**", *path))
            for fqn in self._resolved.by_fqn:
                prefix = ".".join(fqn.split(".")[: -len(path)]) if path else ""
                if prefix and general(prefix) == prefix and pattern.fullmatch(f"{fqn}."):
                    found.setdefault(prefix, []).append(fqn)
            if found:
                yield from ((prefix, tuple(fqns)) for prefix, fqns in found.items())
                return


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
