"""Checks of layouts: blocks whose members fit together, edges that meet, gradients that are right where they stand."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.checks.target import Target, general
from shardplan.diagnostics import Diagnostic, Location
from shardplan.edges import UnsupportedConversionError, lower_edge
from shardplan.inventory import ancestors
from shardplan.layouts import REPLICATE, STREAM, Layout
from shardplan.lower import split_dim
from shardplan.residual import input_conversion, output_conversion
from shardplan.resolve import ResolvedModule
from shardplan.styles import Gradient, Kind, Split


def check_block_members(target: Target) -> Iterator[Diagnostic]:
    """SP203: inside a block every linear is split, and what one side splits the other side adds up."""
    for block in target.resolved.modules:
        if block.style is not None and block.style.opens_block:
            yield from _block_members(target, block)


def _block_members(target: Target, block: ResolvedModule) -> Iterator[Diagnostic]:
    members = list(target.resolved.children(block.fqn))
    splitting = [m for m in members if _split(m) is Split.OUTPUT]
    adding = [m for m in members if _split(m) is Split.INPUT]
    whole = [m for m in members if m.info.kind is Kind.LINEAR and _split(m) is Split.NONE and not _says_partial(m)]
    siblings = ", ".join(_last(m.fqn) for m in splitting) or "none"
    consumers = ", ".join(_last(m.fqn) for m in adding) or "none"
    where = _where(block, target)
    for member in whole:
        yield Diagnostic(
            "SP203",
            f"{general(member.fqn)} stays whole inside block {general(block.fqn)}, whose other linears are split "
            f"(colwise: {siblings}; rowwise: {consumers})",
            where=(splitting[0].rule.where if splitting and splitting[0].rule else where),
            subject=general(member.fqn),
            expected="every linear between the block's edges is split",
            hint=f"make {_last(member.fqn)} colwise if it reads the block's input like {siblings}, rowwise if it reads "
            "what they produce",
        )
    if not adding and not whole:
        yield Diagnostic(
            "SP203",
            f"block {general(block.fqn)} has no rowwise member: nothing makes its output partial, which its edge "
            f"sums over tp (colwise: {siblings})",
            where=where,
            subject=general(block.fqn),
            expected="a rowwise linear at the end of the block",
            hint="make the block's last linear rowwise",
        )
    if adding and not splitting and not whole:
        yield Diagnostic(
            "SP203",
            f"block {general(block.fqn)} has no colwise member to produce what {consumers} reads in parts",
            where=where,
            subject=general(block.fqn),
            expected="colwise linears at the start of the block",
            hint=f"make the linears before {consumers} colwise",
        )


def check_edges(target: Target) -> Iterator[Diagnostic]:
    """SP204: each conversion starts from the layout that it finds, and has a collective."""
    yield from _unsupported(target)
    yield from _stream_ends(target)
    yield from _on_the_stream(target)


def _unsupported(target: Target) -> Iterator[Diagnostic]:
    for module in target.resolved.modules:
        for conversion in (input_conversion(module), output_conversion(module)):
            if conversion is None:
                continue
            try:
                lower_edge(conversion, read_in_parts=module.style is not None and module.style.reads_in_parts)
            except UnsupportedConversionError as unsupported:
                yield _edge_fault(target, module, f"{general(module.fqn)} converts {conversion}, but {unsupported}")


def _stream_ends(target: Target) -> Iterator[Diagnostic]:
    """The stream begins once, at the first layer or behind the embedding, and ends once, before the head."""
    stream, resolved = target.stream, target.resolved
    if not target.sequence_parallel:
        return
    embedding = resolved.by_fqn.get(resolved.inventory.embedding or "")
    from_embedding = embedding is not None and _output_layout(embedding) == STREAM
    first = stream.cuts[0] if stream.cuts else None
    where = resolved.plan.where
    if first is None and not from_embedding:
        yield _stream_fault(
            "nothing cuts the residual stream, so sequence parallelism has no effect", where,
            hint="cut it at the first decoder layer: `.layers.0: {input: replicate -> stream}`",
        )  # fmt: skip
    if len(stream.cuts) > 1 or (first is not None and from_embedding):
        places = [general(m.fqn) for m in stream.cuts] + (["the embedding's output"] if from_embedding else [])
        yield _stream_fault(
            f"the residual stream is cut more than once: at {', '.join(dict.fromkeys(places))}",
            first.rule.where if first and first.rule else where,
            hint="cut it once, at the first decoder layer",
        )
    elif first is not None and not _is_first_member(target, first):
        yield _stream_fault(
            f"the residual stream is cut at {first.fqn}, which is not the first decoder layer",
            first.rule.where if first.rule else where,
            hint=f"cut it at {next(ancestors(first.fqn))}.0",
        )
    if not stream.gathers:
        yield _stream_fault(
            "nothing gathers the residual stream before the head", where,
            hint="gather it behind the final norm: `.norm: {style: sequence_parallel, output: stream -> replicate}`",
        )  # fmt: skip
    elif len(stream.gathers) > 1 or stream.carries(stream.gathers[0].fqn):
        yield _stream_fault(
            f"the residual stream is gathered at {', '.join(dict.fromkeys(general(m.fqn) for m in stream.gathers))}",
            stream.gathers[0].rule.where if stream.gathers[0].rule else where,
            hint="gather it once, behind the final norm",
        )


def _stream_fault(message: str, where: Location | None, hint: str) -> Diagnostic:
    return Diagnostic(
        "SP204", message, where=where, subject="residual stream", expected="one cut and one gather", hint=hint
    )


def _on_the_stream(target: Target) -> Iterator[Diagnostic]:
    """What runs in a decoder layer, outside blocks, takes the stream and gives the stream."""
    stream = target.stream
    for module in target.resolved.modules:
        if module.rule is None or module.block is not None or not stream.carries(module.fqn):
            continue
        taken, given = input_conversion(module), output_conversion(module)
        opens = module.style is not None and module.style.opens_block
        if (opens or target.sequence_parallel) and taken and taken.source != STREAM and module not in stream.cuts:
            yield _edge_fault(
                target, module, f"{general(module.fqn)} takes {taken.source}, but the stream runs there", STREAM
            )
        if (opens or target.sequence_parallel) and given and given.target != STREAM:
            yield _edge_fault(target, module, f"{general(module.fqn)} gives {given.target} to the stream", STREAM)
        if opens and taken and taken.target != REPLICATE:
            yield _edge_fault(
                target, module, f"the members of block {general(module.fqn)} read {taken.target}", REPLICATE
            )
        if opens and given and given.source.kind != "partial" and _adds_up(target, module):
            yield _edge_fault(
                target, module, f"block {general(module.fqn)} ends in a rowwise linear, whose output is partial, "
                f"but its edge starts from {given.source}", Layout("partial"),
            )  # fmt: skip


def _edge_fault(target: Target, module: ResolvedModule, message: str, expected: Layout | None = None) -> Diagnostic:
    return Diagnostic(
        "SP204",
        message,
        where=_where(module, target),
        subject=general(module.fqn),
        expected=str(expected or ""),
        hint="write the conversion as `found layout -> wanted layout`",
    )


def check_gradients(target: Target) -> Iterator[Diagnostic]:
    """SP206: a replicated parameter's gradient is summed exactly where each rank sees only a part of the work."""
    stream = target.stream
    for module in target.resolved.modules:
        for parameter in module.parameters:
            style, rule = parameter.style, parameter.claim
            if style is None or rule is None or split_dim(style, module, parameter.info.name) is not None:
                continue
            fault = None
            if module.block is not None and style.gradient is Gradient.STREAM:
                fault = f"{style.name} stands inside block {general(module.block)}, off the residual stream"
                hint = "use replicated_with_grad_allreduce: its gradient is partial in both modes"
            elif module.block is None and style.gradient is Gradient.STREAM and not _sees_stream(target, module):
                fault = f"{style.name} stands where the residual stream does not run"
                hint = "use null: its gradient is complete there"
            elif stream.carries(module.fqn) and module.block is None and target.sequence_parallel and (
                style.gradient is Gradient.COMPLETE and style.split is Split.NONE and parameter.info.trainable
            ):  # fmt: skip
                fault = (
                    f"{style.name} runs on the cut residual stream, where its gradient covers one part of the sequence"
                )
                hint = "use sequence_parallel"
            if fault:
                name = general(parameter.info.fqn)
                yield Diagnostic(
                    "SP206", f"the gradient of {name} would be wrong: {fault}", where=rule.where, subject=name,
                    expected="a style that says what the gradient is there", hint=hint,
                )  # fmt: skip


def check_ties(target: Target) -> Iterator[Diagnostic]:
    """SP205: tied parameters are one parameter, so their rules place them alike."""
    for group in target.resolved.inventory.ties:
        placements = {}
        for parameter in group:
            module = target.resolved.by_fqn[next(ancestors(parameter.fqn))]
            resolved = next(p for p in module.parameters if p.info.fqn == parameter.fqn)
            dim = split_dim(resolved.style, module, parameter.name)
            placements[parameter.fqn] = ("replicate" if dim is None else f"shard({dim})", resolved.claim)
        if len({placement for placement, _ in placements.values()}) > 1:
            yield Diagnostic(
                "SP205",
                "tied parameters have different placements: "
                + ", ".join(f"{fqn} {placement}" for fqn, (placement, _) in placements.items()),
                where=next((rule.where for _, rule in placements.values() if rule), None),
                subject=group[0].fqn,
                expected="one placement for both, since they are one parameter",
                hint="embedding_rowwise and colwise both cut the vocabulary; or set tie_word_embeddings to false",
            )


# ---------------------------------------------------------------- small questions


def _split(module: ResolvedModule) -> Split:
    return module.style.split if module.style is not None else Split.NONE


def _says_partial(module: ResolvedModule) -> bool:
    """A whole linear that its rule declares to see a part of the work: a router, a latent projection."""
    return all(p.style is not None and p.style.gradient is Gradient.PARTIAL for p in module.parameters)


def _adds_up(target: Target, block: ResolvedModule) -> bool:
    return any(_split(member) is Split.INPUT for member in target.resolved.children(block.fqn))


def _sees_stream(target: Target, module: ResolvedModule) -> bool:
    return target.stream.carries(module.fqn) or module in target.stream.gathers


def _output_layout(module: ResolvedModule) -> Layout:
    conversion = output_conversion(module)
    return conversion.target if conversion else REPLICATE


def _is_first_member(target: Target, module: ResolvedModule) -> bool:
    parent = next(ancestors(module.fqn))
    members = (m for m in target.resolved.modules if m.fqn and next(ancestors(m.fqn)) == parent)
    return target.resolved.inventory.by_fqn[parent].container and next(members) is module


def _last(fqn: str) -> str:
    return fqn.rpartition(".")[2]


def _where(module: ResolvedModule, target: Target) -> Location:
    return module.rule.where if module.rule else target.resolved.plan.where
