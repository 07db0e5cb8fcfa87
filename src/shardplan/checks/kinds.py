"""Checks that a style stands on a module that it can split, and that a module's parameters are split together."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.names import general, with_article
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.inventory import ancestors
from shardplan.lower import split_dim
from shardplan.plan import Rule
from shardplan.resolved import ResolvedModule
from shardplan.styles import Gradient, Split, Style


def check_kinds(target: Target) -> Iterator[Diagnostic]:
    """SP105: a style that splits weights stands on a module whose weights it can split."""
    for module in (*target.faulty.unfit, *target.faulty.misnamed):
        style, rule = module.style, module.rule
        assert style is not None
        assert rule is not None
        misnamed = module in target.faulty.misnamed
        verb = "is not meant for" if misnamed else "cannot split"
        yield Diagnostic(
            "SP105",
            f"style {style.name} {verb} {general(module.fqn)}, {with_article(module.info.class_name)}",
            where=rule.where,
            subject=general(module.fqn),
            expected=f"style {style.name} on a module of kind {listed([kind.value for kind in style.kinds], 'or')}",
            hint=_fitting(target, module, style),
            severity=Severity.WARNING if misnamed else Severity.ERROR,
        )


def _directly(target: Target, claim: Rule) -> tuple[str, ...]:
    """The names that a rule's own pattern matches."""
    return next(matched.fqns for matched in target.resolved.rules if matched.line is claim)


def _contradiction(module: ResolvedModule, claim: Rule) -> Diagnostic:
    """A rule that decides nothing about parameters on top of one that splits them."""
    rule, style, fqn = module.rule, module.style, general(module.fqn)
    assert rule is not None
    said = f"style {style.name}" if style is not None else "its rule"
    return Diagnostic(
        "SP105",
        f"{said} on {fqn} decides nothing about its parameters, which {claim.pattern} ({claim.where}) would split",
        where=rule.where,
        subject=fqn,
        expected="one rule that says how the module is split and what its edges are",
        hint=f"write both in one: `{fqn}: {{style: {claim.style}, ...}}`",
    )


_OF_LINEARS = (Split.OUTPUT, Split.INPUT)


def check_unknown_parameters(target: Target) -> Iterator[Diagnostic]:
    """SP105: a style that splits knows every parameter of its module: a subclass may own more than weight and bias."""
    seen: set[tuple[str, str]] = set()
    for module in target.resolved.modules:
        style, rule = module.style, module.rule
        if style is None or rule is None or style.split not in _OF_LINEARS or module in target.faulty.unfit:
            continue
        for parameter in module.parameters:
            fqn = general(parameter.info.fqn)
            if parameter.info.name in ("weight", "bias") or (fqn, style.name) in seen:
                continue
            seen.add((fqn, style.name))
            yield Diagnostic(
                "SP105",
                f"style {style.name} knows weight and bias, but {module.info.class_name} has a parameter "
                f"{parameter.info.name} of its own, {fqn}",
                where=rule.where,
                subject=fqn,
                expected="a linear or an embedding without further parameters",
                hint="register a style of your own for this class",
            )


def check_token_mixers(target: Target) -> Iterator[Diagnostic]:
    """SP105: on the cut stream each rank has a part of the tokens, and whatever mixes them would see only those."""
    seen: set[str] = set()
    for module in target.resolved.modules if target.sequence_parallel else ():
        style, rule = module.style, module.rule
        on_stream = style is not None and rule is not None and style.gradient is Gradient.STREAM
        if on_stream and rule and mixes_tokens(target, module) and general(module.fqn) not in seen:
            seen.add(general(module.fqn))
            yield Diagnostic(
                "SP105",
                f"{general(module.fqn)} mixes tokens, by attention or a convolution; under sequence_parallel each rank "
                "would see only its part of them",
                where=rule.where,
                subject=general(module.fqn),
                expected="sequence_parallel on modules that treat each token alone: norms",
                hint="make it a block, which gathers the sequence on its way in",
            )


def mixes_tokens(target: Target, module: ResolvedModule) -> bool:
    """Whether a module mixes tokens, or holds one that does, around which no block gathers them."""
    prefix = f"{module.fqn}."
    return any(
        other.inside is None and f"{other.fqn}.".startswith(prefix)
        for other in target.resolved.modules
        if _is_mixer(other)
    )


def in_a_mixer(target: Target, module: ResolvedModule) -> bool:
    """Whether a module mixes tokens, or is among those of which a module that does consists."""
    parent = next(ancestors(module.fqn), "")
    return _is_mixer(module) or any(
        (other.fqn == parent and other.info.attention is not None)
        or (_is_convolution(other) and next(ancestors(other.fqn), None) == parent)
        for other in target.resolved.modules
    )


def _is_mixer(module: ResolvedModule) -> bool:
    return module.info.attention is not None or _is_convolution(module)


def _is_convolution(module: ResolvedModule) -> bool:
    """Along the sequence, as in a Mamba-2 mixer. transformers' Conv1D is a linear."""
    return module.info.class_name == "Conv1d"


def _fitting(target: Target, module: ResolvedModule, style: Style) -> str:
    kind, styles = module.info.kind, target.resolved.styles
    fitting = [name for name, row in styles.items() if kind in row.kinds and row.split is style.split]
    if fitting:
        return f"use {listed(fitting, 'or')}"
    below = (m for m in target.resolved.modules if m.fqn.startswith(f"{module.fqn}."))
    names = list(dict.fromkeys(target.spell(general(m.fqn)) for m in below if m.info.kind in style.kinds))
    if not names:
        return "use a style that does not split, or null"
    return f"name the modules inside it that are to be split: {', '.join(names[:4])}"


def check_parameters(target: Target) -> Iterator[Diagnostic]:
    """SP105: a module's parameters are split as the module is. A rule for one parameter alone would split only that."""
    for module in target.resolved.modules:
        for parameter in module.parameters:
            claim, fqn = parameter.claim, general(parameter.info.fqn)
            if claim is None or claim is module.rule or parameter.style is None:
                continue
            written = split_dim(parameter.style, module, parameter.info.name)
            due = split_dim(module.style, module, parameter.info.name)
            by_number = parameter.style.split is Split.DIM  # which is for parameters, but those of linears
            if not module.info.kind.is_linear if by_number else written == due:
                continue
            if module.rule is not None and parameter.info.fqn not in _directly(target, claim):
                yield _contradiction(module, claim)
                continue
            splits = parameter.style.split is not Split.NONE
            yield Diagnostic(
                "SP105",
                f"{claim.pattern} speaks of a parameter, {fqn}, but "
                + (f"style {parameter.style.name} splits whole modules" if splits else "its module is split"),
                where=claim.where,
                subject=fqn,
                expected=f"one rule for the {module.info.class_name} {target.spell(fqn.rpartition('.')[0])}",
                hint="remove the parameter's name from the pattern" if splits else "remove this rule",
            )
