"""What tests/test_communication.py runs on the pool: one step of a sharded model with its collectives counted."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule

import parity
import tiny_models
from counting import counted, sum_of
from pool import build_mesh
from shardplan.apply import APPLIED

Counts = dict[str, dict[str, int]]


def collectives(case: parity.Case, length: int = 16) -> Counts:
    """Collectives over tp of one forward and one backward, by kind; the gradient sums are among the backward's."""
    mesh = build_mesh(case.mesh)
    model = tiny_models.build(case.model, **case.changes)
    model = case.apply(model, mesh)
    if case.checkpointing:
        model.activation_checkpointing_enable()
    return collectives_of(model, mesh["tp"].get_group().group_name, length=length)


def collectives_by_ranks(case: parity.Case, length: int = 16) -> dict[str, dict[tuple[int, ...], dict[str, int]]]:
    """The same over every group that anything of ours runs in, by its ranks."""
    mesh = build_mesh(case.mesh)
    model = case.apply(tiny_models.build(case.model, **case.changes), mesh)
    ids = torch.randint(0, parity.vocabulary_of(model), (2, length))
    output, forward = counted(lambda: model(input_ids=ids, use_cache=False))
    _, backward = counted(sum_of(output.logits).backward)
    found: dict[str, dict[tuple[int, ...], dict[str, int]]] = {}
    for direction, counting in (("forward", forward), ("backward", backward)):
        groups = {group for group, _ in counting.ours}
        assert len({tuple(ranks_of(group)) for group in groups}) == len(groups)
        found[direction] = {tuple(ranks_of(group)): counting.over(group) for group in groups}
    return found


def ranks_of(group: str) -> list[int]:
    return dist.get_process_group_ranks(_resolve_process_group(group))


def counted_against_plan(case: parity.Case) -> list[str]:
    """Where the collectives that run are not those that the compiled plan lists, plus its coalesced sums."""
    mesh = build_mesh(case.mesh)
    model = tiny_models.build(case.model, **case.changes)
    model = case.apply(model, mesh)
    compiled = getattr(model, APPLIED).compiled
    listed: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for _, direction, name in compiled.collectives():
        listed[direction][name] += 1
    listed["backward"]["all_reduce"] += len(compiled.coalesced_sums())
    measured = collectives_of(model, *groups_of(model))
    return [
        f"{direction}: listed {dict(listed[direction])}, measured {measured[direction]}"
        for direction in listed
        if {kind: number for kind, number in listed[direction].items() if number} != measured[direction]
    ]


def groups_of(model: torch.nn.Module) -> set[str]:
    """The tp group, and those of neighbours that share KV heads."""
    stream = getattr(model, APPLIED).stream
    return {stream.ranks.group, *(ranks.group for ranks in stream.neighbours.values())}


def collectives_of(model: torch.nn.Module, *groups: str, length: int = 16) -> Counts:
    ids = torch.randint(0, tiny_models.VOCABULARY, (2, length))
    output, forward = counted(lambda: model(input_ids=ids, use_cache=False))
    _, backward = counted(sum_of(output.logits).backward)
    return {
        direction: dict(sorted(sum((Counter(counting.over(group)) for group in groups), Counter()).items()))
        for direction, counting in (("forward", forward), ("backward", backward))
    }


def loss_collectives(case: parity.Case) -> Counts:
    """What `labels=` adds: the forward with it against the forward without."""
    mesh = build_mesh(case.mesh)
    model = case.apply(tiny_models.build(case.model), mesh)
    group = mesh["tp"].get_group().group_name
    ids = torch.randint(0, tiny_models.VOCABULARY, (2, 16))
    _, without = counted(lambda: model(input_ids=ids, use_cache=False))
    output, forward = counted(lambda: model(input_ids=ids, labels=ids, use_cache=False))
    _, backward = counted(output.loss.backward)
    return {"without": without.over(group), "with": forward.over(group), "backward": backward.over(group)}


def no_sync_collectives(case: parity.Case) -> list[Counts]:
    """Two micro-batches under FSDP2, of which only the second synchronises: backward collectives over tp of each."""
    mesh = build_mesh(case.mesh)
    model = case.apply(tiny_models.build(case.model), mesh)
    assert isinstance(model, FSDPModule)
    counts = []
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        counts.append(collectives_of(model, mesh["tp"].get_group().group_name))
    return counts
