"""Checks of parameters beside the cut linears: those that cover what each rank has only a part of."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.attention import HeadInfo
from shardplan.checks.groups import Group
from shardplan.checks.names import general
from shardplan.checks.packed import known_lengths
from shardplan.checks.target import Target, listed
from shardplan.diagnostics import Diagnostic
from shardplan.experts import BIAS, GIVING, TAKING, ExpertsInfo
from shardplan.inventory import ParameterInfo, ancestors
from shardplan.plan import Rule
from shardplan.resolved import ResolvedModule, ResolvedParameter
from shardplan.styles import Kind, Split

HEADS = "num_attention_heads"


def check_side_parameters(target: Target) -> Iterator[Diagnostic]:
    """SP208: a whole parameter with an entry for every head, or every cut feature, of which a rank has only some.

    A norm over one head's features is the same for all heads; one over the whole projection width is not.
    """
    if not target.mesh.has_tp:
        return
    for group in target.groups:
        widths = {member.module.info.features[0]: member.name for member in group.of_role("producer")}
        for module in _beside(target, group):
            others = _whole_widths(target, module) | (_counts(group.owner) if module is not group.owner else set())
            given = {width: name for width, name in widths.items() if width not in others}
            for parameter in module.parameters:
                covered = _covered(parameter.info, group.owner, module, given)
                if covered and not _is_cut(parameter):
                    yield _fault(target, parameter, covered)


def _beside(target: Target, group: Group) -> Iterator[ResolvedModule]:
    """The owner of a group and the modules below it that are not linears."""
    prefix = f"{group.owner.fqn}." if group.owner.fqn else ""
    yield group.owner
    for module in target.resolved.children(group.owner.fqn) if group.is_block else ():
        if module.info.kind is Kind.OTHER:
            yield module
    if not group.is_block and prefix:
        own = (m for m in target.resolved.modules if m.fqn.startswith(prefix) and m.info.kind is Kind.OTHER)
        yield from own


def _counts(owner: ResolvedModule) -> set[int]:
    """How many heads there are: a norm that wide is not one over a gate that has a feature for each head."""
    return {value for name, value in owner.info.sizes if "heads" in name}


def _whole_widths(target: Target, module: ResolvedModule) -> set[int]:
    """What linears that stay whole give right beside a module, which then takes from them: in an indexer of its own."""
    around = next(ancestors(module.fqn), "")
    beside = (target.resolved.by_fqn[info.fqn] for info in target.resolved.inventory.children.get(around, ()))
    linears = (m for m in beside if m.info.kind.is_linear)
    return {m.info.features[0] for m in linears if not any(_is_cut(parameter) for parameter in m.parameters)}


def _covered(
    parameter: ParameterInfo, owner: ResolvedModule, module: ResolvedModule, widths: dict[int, str]
) -> str | None:
    """What a parameter has an entry for, in words; None where it is the same for every rank."""
    heads = owner.info.attention
    if len(parameter.shape) == 1:  # a matrix is a router's, or a linear of a class of its own
        (length,) = parameter.shape
        if length in widths and (heads is None or length != heads.head_dim):
            return f"every feature that {widths[length]} gives"
    if heads and parameter.shape and _counts_heads(parameter.shape, heads, of_owner=module is owner):
        return "every head"
    return None


def _counts_heads(shape: tuple[int, ...], heads: HeadInfo, *, of_owner: bool) -> bool:
    """A first dim of as many entries as heads; one dim alone may be a head's features, unless attention owns it."""
    if shape[0] not in (heads.heads, heads.kv_heads) or shape[0] == 1:
        return False
    return len(shape) > 1 or of_owner or shape[0] != heads.head_dim


def _is_cut(parameter: ResolvedParameter) -> bool:
    style = parameter.style
    return style is not None and (style.split is not Split.NONE or style.native is not None)


def _fault(target: Target, parameter: ResolvedParameter, covered: str) -> Diagnostic:
    name = general(parameter.info.fqn)
    return Diagnostic(
        "SP208",
        f"{name} has an entry for {covered}, of which each rank has a part, and it is not cut along with them",
        where=target.where(parameter.claim),
        subject=name,
        expected="a parameter that is the same for every head",
        hint="no style cuts such a parameter yet: replicate the whole module with null, without a block around it",
    )


def check_whole_experts(target: Target) -> Iterator[Diagnostic]:
    """SP203: experts, or an MLP beside cut ones, whole inside a block, whose output edge would count them tp times."""
    for group in target.groups:
        inside = target.resolved.children(group.owner.fqn) if group.is_block else ()
        beside_experts = any(module.info.experts for module in inside)
        for module in inside:
            uncut = [parameter for parameter in module.parameters if not _is_cut(parameter)]
            whole = [p for p in uncut if _gives_a_sum(group, module, p, beside_experts=beside_experts)]
            if whole and not target.explained(module.fqn):
                names = listed([general(parameter.info.fqn) for parameter in whole])
                verb = "stays" if len(whole) == 1 else "stay"
                yield Diagnostic(
                    "SP203",
                    f"{names} {verb} whole in {group.name}, which adds up over tp what each rank gives",
                    where=target.where(whole[0].claim, group.owner.rule),
                    subject=general(module.fqn),
                    expected="experts and MLPs of which every rank has a part",
                    hint="cut their features: colwise and rowwise, or `{style: shard, dim: ...}` for fused experts",
                )


def _gives_a_sum(group: Group, module: ResolvedModule, parameter: ResolvedParameter, *, beside_experts: bool) -> bool:
    """Whether a whole parameter is one of fused experts, or the last projection of an MLP beside experts."""
    if not module.info.kind.is_linear:
        return len(parameter.info.shape) == 3 and module.info.class_name not in _CONVOLUTIONS
    if parameter.info.name != "weight" or not beside_experts:
        return False
    widths = {consumer.module.info.features[0] for consumer in group.of_role("consumer")}
    gives, takes = module.info.features
    behind_parts = module.style is not None and (module.style.bias_once or module.style.counted_once)
    return gives in widths and takes != gives and not behind_parts


_CONVOLUTIONS = ("Conv1d",)


def check_counted_once(target: Target) -> Iterator[Diagnostic]:
    """SP105: what is counted once is an expert that every rank runs whole."""
    for module in target.resolved.modules:
        style, rule = module.style, module.rule
        if style is None or rule is None or not style.counted_once or not rule.style:
            continue
        name, prefix = general(module.fqn), f"{module.fqn}."
        cut = [m for m in target.resolved.modules if m.fqn.startswith(prefix) and any(map(_is_cut, m.parameters))]
        if cut:
            message = f"{general(cut[0].fqn)} below it is cut: its output is a part of a sum already"
        elif not any("expert" in part for part in module.fqn.split(".")):
            message = "its output is handed on inside the block, and does not go into the sum at its end"
        else:
            continue
        yield Diagnostic(
            "SP105",
            f"style {style.name} on {name}: {message}",
            where=rule.where,
            subject=name,
            expected="an expert that hands its input through, or that stays whole beside others",
            hint="remove the rule",
        )


def check_expert_biases(target: Target) -> Iterator[Diagnostic]:
    """SP105: biases of fused experts that are cut: those of cut features are, too, and the last one is added once.

    That of a row-wise linear is, whichever rule calls it whole.
    """
    seen: set[str] = set()
    for module in target.resolved.modules if target.mesh.has_tp else ():
        by_name = {parameter.info.name: parameter for parameter in module.parameters}
        for weight_name in (*GIVING, TAKING) if module.info.experts is not None else ():
            weight, bias = by_name.get(weight_name), by_name.get(weight_name + BIAS)
            if weight is None or bias is None or not _is_cut(weight) or bias.claim is None or bias.style is None:
                continue
            name = general(bias.info.fqn)
            if _is_cut(bias) or bias.style.added_once or name in seen or target.explained(bias.info.fqn):
                continue
            seen.add(name)
            yield _whole_bias(target, name, weight_name, bias.claim)


def _whole_bias(target: Target, name: str, weight: str, claim: Rule) -> Diagnostic:
    message, style = f"where {weight} gives each a part of the features", "{style: shard, dim: 1}"
    if weight == TAKING:
        message, style = "and each adds all of it to its part of what the experts give", "added_once"
    return Diagnostic(
        "SP105",
        f"{name} is whole on every rank, {message}",
        where=claim.where,
        subject=name,
        expected="biases that follow what they are added to",
        hint=f"write `{target.spell(name)}: {style}`",
    )


def check_added_once(target: Target) -> Iterator[Diagnostic]:
    """SP105: what is added once is the last bias of experts of which each rank has a part."""
    seen: set[str] = set()
    for module in target.resolved.modules if target.mesh.has_tp else ():
        cut = module.inside is not None and any(map(_is_cut, module.parameters))
        for parameter in module.parameters:
            style, claim, name = parameter.style, parameter.claim, general(parameter.info.fqn)
            if style is None or claim is None or not style.added_once or name in seen:
                continue
            last = module.info.experts is None or parameter.info.name == TAKING + BIAS
            if not (cut and last) and not target.explained(parameter.info.fqn):
                seen.add(name)
                where = "outside of blocks" if module.inside is None else "there"
                yield Diagnostic(
                    "SP105",
                    f"style {style.name} on {name}: {where} nothing adds it to a part of a sum",
                    where=claim.where,
                    subject=name,
                    expected="the bias behind the last projection of experts that are cut",
                    hint="use null outside of blocks, replicated_with_grad_allreduce inside",
                )


def check_norms_of_parts(target: Target) -> Iterator[Diagnostic]:
    """SP208: behind a block's last row-wise linear there are parts of a sum, and a norm over them is not one of it.

    Not in attention, where norms of queries and keys are often defined last.
    """
    for group in target.groups:
        consumers = group.of_role("consumer") if group.is_block and group.owner.info.attention is None else ()
        if not consumers:
            continue
        width, behind = consumers[-1].module.info.features[0], target.order[consumers[-1].module.fqn]
        for module in target.resolved.children(group.owner.fqn):
            shapes = {parameter.info.shape for parameter in module.parameters}
            if module.info.kind is Kind.OTHER and shapes == {(width,)} and target.order[module.fqn] > behind:
                name = general(module.fqn)
                yield Diagnostic(
                    "SP208",
                    f"{name} stands behind {consumers[-1].name} inside {group.name}: it would norm a part of a sum",
                    where=target.where(module.rule, group.owner.rule),
                    subject=name,
                    expected="a block that ends in its row-wise linear",
                    hint=f"make what stands before {name} the block, or leave {group.name} whole",
                )


# ---------------------------------------------------------------- parameters that are cut by number


def check_shards(target: Target) -> Iterator[Diagnostic]:
    """SP105: `shard` stands inside a block, on a dim along which something else there is cut, too."""
    by_owner = {group.owner.fqn: group for group in target.groups}
    for module in target.resolved.modules:
        for parameter in module.parameters:
            claim, style = parameter.claim, parameter.style
            if claim is None or style is None or style.split is not Split.DIM or claim.style != style.name:
                continue  # nobody's, or a part of a style that knows its modules
            if module.info.kind.is_linear and claim is not module.rule:
                continue  # `check_parameters` says that
            around = target.resolved.by_fqn.get(module.inside or "")
            if around is not None and around.style is not None and around.style.parts:
                continue  # `check_parts` compares it with the style's own
            problem = _misplaced_shard(target, parameter, module, by_owner.get(module.inside or ""))
            if problem and not target.explained(module.fqn):
                message, expected = problem
                name = general(parameter.info.fqn)
                hint = "remove the rule, or replicate with replicated_with_grad_allreduce inside a block"
                yield Diagnostic("SP105", f"style shard on {name}: {message}", claim.where, name, expected, hint)


def _misplaced_shard(
    target: Target, parameter: ResolvedParameter, module: ResolvedModule, group: Group | None
) -> tuple[str, str] | None:
    """What is wrong with it, and what was expected."""
    shape, dim = parameter.info.shape, parameter.style.dim if parameter.style else 0
    if dim >= len(shape):
        return f"it has no dim {dim}, its shape is {shape}", f"a dim below {len(shape)}"
    lies = _lies(module.info.experts, parameter.info.name) if len(shape) == 3 else None
    if lies is not None and dim != lies:
        side = "gives" if parameter.info.name in GIVING else "takes"
        return f"an expert {side} its features along dim {lies}, and dim {dim} is that of the stream", f"dim: {lies}"
    if len(shape) > 2 and dim == 0:
        return "it cuts over the experts, and each rank routes to all of them", "a dim of features inside an expert"
    if module.inside is None:
        return (
            "activations are whole outside of blocks, and each rank would have a part of it",
            "a place inside a block",
        )
    if group is None or _follows_heads(target, shape, dim, group, module) or _pairs(target, parameter, module):
        return None  # without a group: what is wrong with its block is said already
    return f"nothing else in {group.name} is cut along a dim of {shape[dim]}", "a dim of heads or of cut features"


def _lies(experts: ExpertsInfo | None, name: str) -> int | None:
    """The dim of a parameter of fused experts along which each rank may have a part; None where nobody says."""
    if experts is None or name not in (*GIVING, TAKING):
        return None
    return experts.taken if name == TAKING else experts.given


def _follows_heads(target: Target, shape: tuple[int, ...], dim: int, group: Group, module: ResolvedModule) -> bool:
    """Whether a dim counts the heads of attention, or the features that a linear of the group gives in parts."""
    heads = group.owner.info.attention
    widths = {member.module.info.features[0] for member in group.of_role("producer")}
    if heads is not None and dim == 0 and _counts_heads(shape, heads, of_owner=module is group.owner):
        return True
    if heads is None and module is group.owner and shape == (target.resolved.inventory.size(HEADS, module.fqn),):
        return True  # latent attention tells of no head dim
    return shape[dim] in widths and (heads is None or shape[dim] != heads.head_dim)


def _pairs(target: Target, parameter: ResolvedParameter, module: ResolvedModule) -> bool:
    """Fused experts: what one parameter gives in parts, another one of the module takes in parts, or adds to it.

    Two vectors neither give nor take.
    """
    others = [p for p in module.parameters if p is not parameter and p.style is not None and p.style.split is Split.DIM]
    matrices = others if len(parameter.info.shape) > 1 else [p for p in others if len(p.info.shape) > 1]
    lengths = _lengths(target, parameter, module)
    return any(lengths & _lengths(target, other, module) for other in matrices)


def _lengths(target: Target, parameter: ResolvedParameter, module: ResolvedModule) -> set[int]:
    """Of its sections; of one without, its own, and half of it where the module takes gate and up in turns."""
    (whole,) = _cut_length(parameter) or (0,)
    sections = set(known_lengths(target.resolved.inventory, module, parameter.style, whole))
    in_turns = module.info.experts is not None and not module.info.experts.concatenated
    return sections or ({whole, whole // 2} if in_turns else {whole})


def _cut_length(parameter: ResolvedParameter) -> set[int]:
    shape, dim = parameter.info.shape, parameter.style.dim if parameter.style else 0
    return {shape[dim]} if dim < len(shape) else set()
