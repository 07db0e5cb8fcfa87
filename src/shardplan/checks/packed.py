"""Checks of packed weights: sections that a plan should declare, and those that it declares."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from shardplan.checks.groups import Group
from shardplan.checks.names import general, with_article
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic
from shardplan.inventory import Inventory
from shardplan.lower import split_dim
from shardplan.resolved import ResolvedModule
from shardplan.sections import UnknownSizeError, section_lengths
from shardplan.styles import Split, Style


def check_packed(target: Target) -> Iterator[Diagnostic]:
    """SP105: a colwise linear that packs several projections, whose columns are not those that the next one takes."""
    for group in target.groups:
        producers, consumers = group.of_role("producer"), group.of_role("consumer")
        if len(producers) != 1 or len(consumers) != 1 or not (rule := producers[0].rule):
            continue
        columns, rows = producers[0].module.info.features[0], consumers[0].module.info.features[1]
        style = producers[0].module.style
        if columns == rows or (style and style.sections) or group.owner.info.interleaves:
            continue
        fqn, sections = general(producers[0].module.fqn), _sections(group, columns, rows)
        yield Diagnostic(
            "SP105",
            f"{fqn} gives {columns} features and {consumers[0].name} takes {rows}: it packs {sections}, and a plain "
            "cut would give each rank parts of some of them only",
            where=rule.where,
            subject=fqn,
            expected="a style that cuts each packed section on its own",
            hint="declare them, if they lie one behind the other: "
            f"`{target.spell(fqn)}: {{style: colwise, sections: [{_declared(group, rows)}]}}`",
        )


def _sections(group: Group, columns: int, rows: int) -> str:
    heads = group.owner.info.attention
    if _packs_attention(group, columns) and heads:
        sizes = [heads.heads * heads.head_dim] + 2 * [heads.kv_heads * heads.head_dim]
    elif columns % rows == 0:
        sizes = [rows] * (columns // rows)
    else:
        return "sections"
    return f"sections of {', '.join(map(str, sizes))}"


def _packs_attention(group: Group, columns: int) -> bool:
    heads = group.owner.info.attention
    return heads is not None and columns == (heads.heads + 2 * heads.kv_heads) * heads.head_dim


def _declared(group: Group, rows: int) -> str:
    """Sections as a plan may write them, as far as the widths tell."""
    columns = group.of_role("producer")[0].module.info.features[0]
    if _packs_attention(group, columns):
        kv = "num_key_value_heads * head_dim"
        return f"q: num_attention_heads * head_dim, k: {kv}, v: {kv}"
    if columns == 2 * rows:
        return "gate: 1, up: 1"
    return ", ".join(f"part{number}: 1" for number in range(columns // rows)) if columns % rows == 0 else "..."


# ---------------------------------------------------------------- SP214


def known_lengths(inventory: Inventory, module: ResolvedModule, style: Style | None, whole: int) -> tuple[int, ...]:
    """How long the sections of a style are at a module; empty where it has none, or a size that nobody knows."""
    try:
        return section_lengths(style.sections, inventory, module.fqn, whole) if style else ()
    except UnknownSizeError:
        return ()


def check_sections(target: Target) -> Iterator[Diagnostic]:
    """SP214: sections fill the dim that is cut, their names differ, and somebody knows their sizes."""
    for module in target.resolved.modules:
        style, rule = module.style, module.rule
        if style is None or rule is None or not style.sections or target.explained(module.fqn):
            continue
        problem = _misfit(target, module, style)
        if problem:
            message, expected = problem
            yield Diagnostic(
                "SP214",
                f"sections of {general(module.fqn)}: {message}",
                where=rule.where,
                subject=general(module.fqn),
                expected=expected,
                hint="sizes are sums and products of numbers, attributes of the modules around, and config fields",
            )


def _misfit(target: Target, module: ResolvedModule, style: Style) -> tuple[str, str] | None:
    inventory = target.resolved.inventory
    cut = {p.info.name: dim for p in module.parameters if (dim := split_dim(style, module, p.info.name)) is not None}
    if not cut:
        return f"{style.name} cuts no parameter of it", "sections with a style that cuts: colwise or shard"
    names = [section.name for section in style.sections]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return f"two are named {twice}", "a name for each"
    tied = {p.identity for group in inventory.ties for p in group}
    for parameter in module.parameters:
        dim = cut.get(parameter.info.name)
        try:
            lengths = section_lengths(style.sections, inventory, module.fqn, parameter.info.shape[dim or 0])
        except UnknownSizeError as unknown:
            return f"nobody knows '{unknown}'", "the name of a whole number"
        if dim is not None and parameter.info.shape[dim] != sum(lengths):
            spelled = " + ".join(map(str, lengths))
            return (
                f"{spelled} is {sum(lengths)}, but {parameter.info.name} has {parameter.info.shape[dim]}",
                f"sections that add up to {parameter.info.shape[dim]}",
            )
        if dim is not None and parameter.info.identity in tied:
            return f"{parameter.info.name} is tied to another parameter", "a packed parameter of its own"
    return None


def check_packing(target: Target) -> Iterator[Diagnostic]:
    """SP214: sections are those that the module takes apart, as far as the widths around it tell."""
    for group in target.groups:
        consumers = group.of_role("consumer")
        rows = consumers[0].module.info.features[1] if len(consumers) == 1 else 0
        for member in group.members:
            style, module = member.module.style, member.module
            if style is None or not style.sections or module.rule is None or module.part or not rows:
                continue
            packs = member.role == "producer"
            whole = module.info.features[0] if packs else rows
            lengths = known_lengths(target.resolved.inventory, module, style, whole)
            due = _due(group, whole, rows) if packs else ((rows,),)
            if sum(lengths) == whole and due and lengths not in due:
                spelled = " or ".join(", ".join(map(str, each)) for each in due)
                yield Diagnostic(
                    "SP214",
                    f"sections of {general(module.fqn)} are {', '.join(map(str, lengths))}, where {group.name} takes "
                    f"it apart into {spelled}",
                    where=module.rule.where,
                    subject=general(module.fqn),
                    expected=f"sections of {spelled}" if "," in spelled else "no sections: it packs nothing",
                    hint="the order counts, too: it is that of the weight's rows",
                )
    for module in target.resolved.modules:
        ends = (target.resolved.inventory.embedding, target.resolved.inventory.head)
        style = module.style
        if module.fqn not in ends or style is None or not style.sections or _misfit(target, module, style):
            continue
        if module.rule is not None:
            yield Diagnostic(
                "SP214",
                f"{general(module.fqn)} has sections, but a vocabulary is cut as one",
                where=module.rule.where,
                subject=general(module.fqn),
                expected="no sections",
                hint="remove them",
            )


def _due(group: Group, columns: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """The sections that a projection of so many columns may have before a linear that takes so many rows."""
    heads = group.owner.info.attention
    if columns == rows or (heads and columns == heads.kv_heads * heads.head_dim):
        return ((columns,),)
    if heads and _packs_attention(group, columns):
        kv = heads.kv_heads * heads.head_dim
        return ((heads.heads * heads.head_dim, kv, kv), *(((columns,),) if heads.kv_heads == heads.heads else ()))
    if columns % rows == 0:
        return ((rows,) * (columns // rows), (columns,)) if heads else ((rows,) * (columns // rows),)
    return ()


def check_dim(target: Target) -> Iterator[Diagnostic]:
    """SP214: a rule that gives a dim has a style that cuts one by number."""
    for matched in target.resolved.rules:
        rule = matched.line
        style = target.resolved.styles.get(rule.style or "")
        if rule.dim is not None and matched.fqns and (style is None or style.split is not Split.DIM):
            yield Diagnostic(
                "SP214",
                f"{rule.pattern} gives dim: {rule.dim}, of which {rule.spoken.partition(',')[0]} knows nothing",
                where=rule.where,
                subject=rule.pattern.text,
                expected="style shard with it",
                hint="other styles know which dim they cut: remove it",
            )


_OF_EVERY_RANK = ("top_k", "topk", "top_k_group", "topk_group", "n_group", "num_experts", "num_experts_per_tok",
                  "num_local_experts", "n_routed_experts", "hidden_size", "num_hidden_layers", "layer_idx")  # fmt: skip
_OF_ONE_HEAD = ("head_dim", "head_size", "qk_head_dim", "v_head_dim", "num_key_value_groups")


def check_local_sizes(target: Target) -> Iterator[Diagnostic]:
    """SP214: local sizes are whole numbers that the module has. SP201: tp divides all of them."""
    inventory = target.resolved.inventory
    for module in target.resolved.modules if target.mesh.has_tp else ():
        style, rule = module.style, module.rule
        if style is None or rule is None:
            continue
        has = {**dict(module.info.sizes), **{f"config.{name}": value for name, value in inventory.sizes}}
        for attribute in style.local_sizes:
            if wrong := _not_local(module, attribute, known=attribute in has):
                message, expected, hint = wrong
                yield Diagnostic(
                    "SP214", message, where=rule.where, subject=general(module.fqn), expected=expected, hint=hint
                )
        counts = {attribute: has[attribute] for attribute in style.local_sizes if attribute in has}
        odd = [f"{attribute}={count}" for attribute, count in counts.items() if count % target.mesh.tp]
        # Attention is judged by its heads, and a part together with the module that it is a part of.
        if odd and module.info.attention is None and not module.part:
            yield Diagnostic(
                "SP201",
                f"tp={target.mesh.tp} does not divide {listed(odd)} of {general(module.fqn)}",
                where=rule.where,
                subject=general(module.fqn),
                expected=f"a tp that divides all that is counted: {_divisors(gcd(*counts.values()))}",
                hint="choose one of these degrees",
            )


def _not_local(module: ResolvedModule, attribute: str, *, known: bool) -> tuple[str, str, str] | None:
    """Message, expectation and hint where an attribute cannot be a local size of a module."""
    fqn, field = general(module.fqn), attribute.removeprefix("config.")
    remove = f"remove {attribute} from local_sizes"
    if field in _OF_ONE_HEAD:
        return (
            f"{attribute} of {fqn} counts within one head, or between heads, and is the same on every rank",
            "local sizes that count heads, groups, or features over all of them",
            remove,
        )
    if field in _OF_EVERY_RANK:
        return (
            f"{attribute} of {fqn} counts what every rank has all of",
            "local sizes that count heads, groups, or features of which each rank has a part",
            remove,
        )
    if not known:
        return (
            f"{fqn}, {with_article(module.info.class_name)}, has no whole number {attribute}",
            f"one of {listed(sorted(dict(module.info.sizes)), 'or')}" if module.info.sizes else "",
            "local_sizes are attributes of the module, or config.<field>",
        )
    return None


def _divisors(number: int) -> str:
    found = [str(degree) for degree in range(1, number + 1) if number % degree == 0]
    return listed(found if len(found) <= 12 else [*found[:12], "more"], "or")
