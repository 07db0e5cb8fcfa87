"""Checks of the model's sizes against the tp degree: heads, and every dim that is cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from shardplan.checks.target import Target, general
from shardplan.diagnostics import Diagnostic
from shardplan.inventory import HeadInfo
from shardplan.lower import split_dim
from shardplan.resolve import ResolvedModule, ResolvedParameter
from shardplan.styles import Kind, Split


def check_heads(target: Target) -> Iterator[Diagnostic]:
    """SP201: tp divides heads and KV heads. Columns may divide where heads do not, and then heads are torn apart."""
    tp = target.mesh.tp
    for module in target.resolved.modules:
        heads = module.info.attention
        if heads is None or not _splits_outputs(target, module):
            continue
        if heads.heads % tp or heads.kv_heads % tp:
            yield Diagnostic(
                "SP201",
                f"{general(module.fqn)} has {heads.heads} heads and {heads.kv_heads} KV heads of head_dim "
                f"{heads.head_dim}, which tp={tp} does not divide",
                where=module.rule.where if module.rule else target.resolved.plan.where,
                subject=general(module.fqn),
                expected=f"tp among {_degrees(_common(heads))}",
                hint="choose one of these degrees",
            )


def _splits_outputs(target: Target, module: ResolvedModule) -> bool:
    prefix = f"{module.fqn}."
    return any(
        other.fqn.startswith(prefix) and other.style is not None and other.style.split is Split.OUTPUT
        for other in target.resolved.modules
    )


def check_dims(target: Target) -> Iterator[Diagnostic]:
    """SP202: tp divides every dim that is cut; a vocabulary need only have something for every rank."""
    tp = target.mesh.tp
    for module in target.resolved.modules:
        for parameter in module.parameters:
            dim = split_dim(parameter.style, module, parameter.info.name)
            if dim is None:
                continue
            length = parameter.info.shape[dim]
            if _is_vocabulary(target, module):
                if -(-length // tp) * (tp - 1) >= length:
                    yield _fault(target, parameter, dim, f"leaves ranks without a row over tp={tp}", "fewer ranks")
            elif length % tp:
                yield _fault(
                    target, parameter, dim, f"would be cut into {_shards(length, tp)} over tp={tp}", _degrees(length)
                )


def _fault(target: Target, parameter: ResolvedParameter, dim: int, problem: str, expected: str) -> Diagnostic:
    info, rule = parameter.info, parameter.claim
    assert rule is not None
    partners = f" (with {', '.join(_same_dim(target, parameter, dim))})" if _same_dim(target, parameter, dim) else ""
    return Diagnostic(
        "SP202",
        f"dim {dim} of {general(info.fqn)}, {info.shape[dim]} long{partners}, {problem}",
        where=rule.where,
        subject=general(info.fqn),
        expected=f"tp among {expected}" if expected[0].isdigit() else expected,
        hint="choose one of these degrees, or leave the pair whole with null and no block around it",
    )


def _same_dim(target: Target, parameter: ResolvedParameter, dim: int) -> list[str]:
    """The other weights of the block that are cut along the same features."""
    length = parameter.info.shape[dim]
    owner = parameter.info.fqn.rpartition(".")[0]
    block = target.resolved.by_fqn[owner].block
    if block is None:
        return []
    partners = []
    for other in target.resolved.children(block):
        for candidate in other.parameters:
            cut = split_dim(candidate.style, other, candidate.info.name)
            same = cut is not None and candidate.info.shape[cut] == length and candidate.info.name == "weight"
            if same and candidate.info.fqn != parameter.info.fqn and other.fqn != owner:
                partners.append(other.fqn.rpartition(".")[2])
    return partners


def _is_vocabulary(target: Target, module: ResolvedModule) -> bool:
    return module.info.kind is Kind.EMBEDDING or module.fqn == target.resolved.inventory.head


def _shards(length: int, tp: int) -> str:
    chunk = -(-length // tp)
    return "+".join(str(max(0, min(chunk, length - rank * chunk))) for rank in range(tp))


def _common(heads: HeadInfo) -> int:
    return gcd(heads.heads, heads.kv_heads)


def _degrees(length: int) -> str:
    return ", ".join(str(degree) for degree in range(1, length + 1) if length % degree == 0)
