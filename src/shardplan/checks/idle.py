"""Checks that nothing is written in vain, and that what stays whole is said: right plans that could do more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardplan.checks.names import general
from shardplan.checks.target import Target, count, size
from shardplan.diagnostics import Diagnostic, Severity
from shardplan.edges import UnsupportedConversionError, lower_edge
from shardplan.from_python import DICT_PLAN
from shardplan.hf.plan import is_derived
from shardplan.hf.structure import language_model
from shardplan.inventory import Inventory, ancestors
from shardplan.layouts import REPLICATE, STREAM
from shardplan.plan import Rule
from shardplan.residual import input_conversion, output_conversion, takes_no_activation
from shardplan.resolved import Matched, ResolvedModule
from shardplan.styles import Kind, Split


def check_idle_rules(target: Target) -> Iterator[Diagnostic]:
    """SP110: a rule decides something, unless others override it wherever it matches or there is nothing to decide.

    Only the plan's own rules are asked: those of layers below were written for other models, too.
    """
    deciding = {id(rule) for module in target.resolved.modules for rule in _decide(module)}
    for matched in target.resolved.rules:
        rule = matched.line
        if target.inherited(rule) or not matched.fqns or id(rule) in deciding or id(rule) in target.faulty.rules:
            continue
        yield Diagnostic(
            "SP110",
            f"{rule.pattern} does nothing: {_why(target, matched)}",
            where=rule.where,
            subject=str(rule.pattern),
            expected="a rule that decides about a parameter or an edge",
            hint="remove it",
            severity=Severity.WARNING,
        )


def _decide(module: ResolvedModule) -> Iterator[Rule]:
    """The rules that have a say in what is done to a module."""
    yield from (parameter.claim for parameter in module.parameters if parameter.claim is not None)
    style = module.style
    if module.rule is None or style is None:
        return
    overrides = len(module.speakers) > 1
    acts = style.opens_block or style.positions or style.counted_once or style.native is not None
    if overrides or acts or _converts(module):
        yield module.rule


def _converts(module: ResolvedModule) -> bool:
    """Whether an edge runs anything in some mode; a style's own counts where the module has parameters."""
    assert module.rule is not None
    if not (module.rule.input or module.rule.output or module.info.parameters):
        return False
    for conversion in (input_conversion(module), output_conversion(module)):
        try:
            edge = lower_edge(conversion, read_in_parts=_in_parts(module)) if conversion else None
        except UnsupportedConversionError:
            return True  # reported as such
        if edge and (edge.whole or edge.cut):
            return True
    return False


def _in_parts(module: ResolvedModule) -> bool:
    return module.style is not None and module.style.reads_in_parts


def check_ignored_edges(target: Target) -> Iterator[Diagnostic]:
    """SP110: an edge is never run at the input of an embedding or of position tables, which is no activation.

    A dict says so of every embedding: torch's row-wise style has to be told of whole ids.
    """
    for module in target.resolved.modules:
        rule, takes = module.rule, takes_no_activation(module)
        if takes and rule is not None and rule.input is not None and rule.where.file != DICT_PLAN:
            yield Diagnostic(
                "SP110",
                f"{general(module.fqn)} {takes}: input {rule.input} does nothing",
                where=rule.where,
                subject=general(module.fqn),
                expected="edges where activations pass",
                hint="remove `input`",
                severity=Severity.WARNING,
            )


def _why(target: Target, matched: Matched[Rule]) -> str:
    modules = [target.resolved.by_fqn[fqn] for fqn in matched.fqns if fqn in target.resolved.by_fqn]
    winner = next((m.rule for m in modules if m.rule is not None and m.rule is not matched.line), None)
    if winner is not None:
        return f"{winner.pattern} ({winner.where}) decides wherever it matches"
    return f"{general(matched.fqns[0])} has no parameter to decide about and no edge is stated"


# ---------------------------------------------------------------- SP211


def check_whole(target: Target) -> Iterator[Diagnostic]:
    """SP211: what is large and could be cut, but is left whole by a rule: right, and paid for on every rank."""
    if not target.mesh.has_tp:
        return
    cut = {general(module.fqn) for module in target.resolved.modules if _splits(module)}
    ends = {target.resolved.inventory.embedding, target.resolved.inventory.head}
    whole: dict[str, tuple[Rule, Rule | None, int]] = {}
    for module in target.resolved.modules:
        claimed = [p for p in module.parameters if p.claim is not None and p.style is not None]
        could = module.info.kind is not Kind.OTHER and (module.fqn in ends or general(module.fqn) in cut)
        if not claimed or not could or _splits(module):
            continue
        rule = claimed[0].claim
        assert rule is not None
        nbytes = sum(p.info.nbytes for p in module.parameters)
        claim, of_module, before = whole.get(general(module.fqn), (rule, module.rule, 0))
        whole[general(module.fqn)] = (claim, of_module, before + nbytes)
    for name, (rule, of_module, nbytes) in whole.items():
        yield Diagnostic(
            "SP211",
            f"{name} stays whole by {rule.pattern}: {size(nbytes)} on every tp rank, where a cut would leave "
            f"{size(-(-nbytes // target.mesh.tp))}{target.see(rule, of_module)}",
            where=target.where(rule, of_module),
            subject=name,
            expected="",
            hint="leave it so if that is meant; otherwise cut it as its like are cut",
            severity=Severity.NOTE,
        )
    yield from _gathered_head(target)


def check_towers(target: Target) -> Iterator[Diagnostic]:
    """SP211: what sees or hears for a language model, where transformers' plan is completed by leaving it whole."""
    inventory = target.resolved.inventory
    base = language_model(inventory).removesuffix(".")
    for fqn in _beside(inventory, base) if target.mesh.has_tp else ():
        inside = [p for m in target.resolved.modules if f"{m.fqn}.".startswith(f"{fqn}.") for p in m.parameters]
        rules = [p.claim for p in inside if p.claim is not None and is_derived(p.claim)]
        if not rules or len(rules) < len(inside):
            continue  # nothing to cut, or the user has a say in it
        nbytes = sum(p.info.nbytes for p in inside)
        keys = [key for key, _ in inventory.tp_plan if f"{key}.".startswith(f"{general(fqn)}.")]
        unused = f"; of transformers' own plan {count(len(keys), 'key')} for it {_are(keys)} left out" if keys else ""
        yield Diagnostic(
            "SP211",
            f"{general(fqn)} stays whole on purpose, beside the language model {base}: {size(nbytes)} on every tp rank"
            f"{unused}",
            where=rules[0].where,
            subject=general(fqn),
            expected="",
            hint="leave it so if that is meant; otherwise cut it by rules of your own",
            severity=Severity.NOTE,
        )


def _are(keys: Sequence[str]) -> str:
    return "is" if len(keys) == 1 else "are"


def _beside(inventory: Inventory, base: str) -> Iterator[str]:
    """The modules next to ``base`` and next to what is around it, the head aside; nothing where ``base`` is all."""
    for around in ancestors(base):
        for child in inventory.children[around]:
            if not f"{base}.".startswith(f"{child.fqn}.") and child.fqn != inventory.head:
                yield child.fqn


def _splits(module: ResolvedModule) -> bool:
    return module.style is not None and (module.style.split is not Split.NONE or module.style.native is not None)


def _gathered_head(target: Target) -> Iterator[Diagnostic]:
    """SP212, SP211: a head that gathers its logits, against what the plan says of them, or in silence."""
    head, logits = target.resolved.head, target.resolved.plan.logits
    if head is None or head.rule is None or head.style is None or head.style.split is not Split.OUTPUT:
        return
    given = output_conversion(head)
    if given is None or given.target not in (REPLICATE, STREAM) or logits == "gathered":
        return
    if logits == "sharded":
        yield Diagnostic(
            "SP212",
            f"the plan says `logits: sharded`, but {head.fqn} gathers them: output {given}",
            where=target.resolved.plan.where if target.inherited(head.rule) else head.rule.where,
            subject=head.fqn,
            expected="output: shard(-1)",
            hint="a vocabulary-parallel loss on gathered logits is off by ln(tp): remove one of the two",
        )
    else:
        yield Diagnostic(
            "SP211",
            f"{head.fqn} gathers the logits, which are tp={target.mesh.tp} times as large as what the loss needs",
            where=head.rule.where,
            subject=head.fqn,
            expected="output: shard(-1)",
            hint="write `logits: gathered` if callers need them whole; for evaluation there is gathered_logits()",
            severity=Severity.NOTE,
        )
