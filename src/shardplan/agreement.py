"""Ranks that are about to shard one model agree on it: the plan, the parameters, and the weights themselves.

Each rank keeps a slice of its own weights, so weights that differ between ranks would become a model that nobody
trained. Only checksums travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan import _compat
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Diagnostic, PlanError

MOST_NAMED = 5  # parameters that a message lists


def require(
    model: nn.Module, compiled: CompiledPlan | None, findings: tuple[Diagnostic, ...], mesh: DeviceMesh
) -> None:
    """Return on every rank of ``mesh``, or raise on every rank.

    Args:
        model: not yet touched.
        compiled: what this rank would apply; None where ``findings`` refuse it.
        findings: what this rank found wrong.
        mesh: whose ranks must agree.

    Raises:
        PlanError: ``findings``, or SP303 where another rank refused, compiled something else, or holds other weights.
    """
    _require_all_ranks(mesh)
    alike, same_plan = equal_on_ranks([int(compiled is None), _plan_fingerprint(compiled)], mesh)
    if compiled is None:
        raise PlanError(findings)
    if not alike or not same_plan:
        message = "ranks compiled different plans" if alike else "another rank refused the plan"
        raise PlanError([_disagreement(message, "the same model, plan and options on every rank")])
    names = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    weights = [checksum(parameter) for parameter in model.parameters() if not parameter.is_meta]
    unequal = [name for name, equal in zip(names, equal_on_ranks(weights, mesh), strict=True) if not equal]
    if unequal:
        more = f" and {len(unequal) - MOST_NAMED} more" if len(unequal) > MOST_NAMED else ""
        message = f"ranks hold different weights in {', '.join(unequal[:MOST_NAMED])}{more}"
        expected = "equal weights on every rank: seed alike, load the same checkpoint, or broadcast them from rank 0"
        raise PlanError([_disagreement(message, expected)])


def _require_all_ranks(mesh: DeviceMesh) -> None:
    """A mesh smaller than the world is a slice of one that covers it, or a mistake."""
    whole = _compat.root_mesh(mesh)
    if whole.size() != dist.get_world_size():
        axes = ",".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        raise PlanError([Diagnostic(
            "SP301", f"mesh '{axes}' has {whole.size()} ranks, but the world has {dist.get_world_size()}", subject=axes,
            expected="axes whose sizes multiply to the world size, or a slice of such a mesh",
            hint="build it with init_device_mesh over all ranks, then slice: mesh['dp', 'tp']",
        )])  # fmt: skip


def checksum(parameter: Tensor) -> int:
    """A 63-bit number that changes with the bits of ``parameter`` and with their order.

    The sum of bits weighted by odd numbers that grow with the position, modulo 2^64. The temporary memory is one chunk,
    not a copy of the parameter.
    """
    bits = parameter.detach().contiguous().view(-1).view(_INTEGERS[parameter.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        total += (part * torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=bits.device)).sum()
    return fingerprint((tuple(parameter.shape), str(parameter.dtype), int(total)))


CHUNK = 2**22  # elements: 32 MiB of 64-bit numbers
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _plan_fingerprint(compiled: CompiledPlan | None) -> int:
    identities: dict[int, int] = {}
    if compiled is None:
        return 0
    ties = [identities.setdefault(p.identity, len(identities)) for m in compiled.modules for p in m.parameters]
    facts = [(p.fqn, p.shape, str(p.placement), p.gradient.name) for m in compiled.modules for p in m.parameters]
    sections = [(p.fqn, p.sections) for m in compiled.modules for p in m.parameters]
    edges = [(m.fqn, m.style, m.input, m.output, m.local_sizes) for m in compiled.modules]
    rest = (compiled.mesh, compiled.sequence_parallel, compiled.units, compiled.root_reshard, compiled.recompute,
            compiled.head, compiled.mixed_precision, compiled.cpu_offload)  # fmt: skip
    return fingerprint((ties, facts, sections, edges, rest))


def fingerprint(facts: Any) -> int:
    """A 63-bit number that stands for ``repr(facts)``, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big") >> 1


def equal_on_ranks(numbers: Sequence[int], mesh: DeviceMesh) -> list[bool]:
    """Whether every rank of the mesh has the same number, for each."""
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    both_ends = torch.tensor([numbers, [-number for number in numbers]], dtype=torch.int64, device=device)
    for group in mesh.get_all_groups():
        dist.all_reduce(both_ends, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = both_ends[0], -both_ends[1]
    return [bool(equal) for equal in (highest == lowest).tolist()]


def _disagreement(message: str, expected: str) -> Diagnostic:
    return Diagnostic("SP303", message, subject="ranks", expected=expected, hint="compare what each rank was given")
