"""The gradient norm and clipping for parameters of any layout: sharded, replicated, partial, or plain tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, isfinite, prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardplan import _compat

# Elements whose powers are added up in the caller's dtype; such rows are then added up in fp64. On CPU torch's own fp32
# norm of 6M elements is off by 2e-4 (order 2) and 3e-3 (order 3), because it adds them up one after the other.
ROW = 1024
PIECE = 16384 * ROW  # elements whose row norms are taken at a time: 64 MiB in fp32
EPSILON = 1e-6  # beside the norm in the clip coefficient, as in torch.nn.utils.clip_grad_norm_

Dims = tuple[int, ...]  # of a mesh
Groups = tuple[str, ...]  # names of process groups; reducing over each in turn reduces over them all


def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    dp_cp_group: dist.ProcessGroup | None = None,  # noqa: ARG001 - NeMo-RL's signature
    tp_group: dist.ProcessGroup | None = None,  # noqa: ARG001
    norm_type: float | str = 2,
    dtype: torch.dtype = torch.float32,
) -> float:
    """The norm of all gradients as one vector; the same number on every rank.

    What to reduce is derived from each gradient's placements: a sharded gradient counts on every rank, a replicated
    one once, a partial one after its reduction. Parameters may lie on different meshes, be plain tensors (which count
    on each rank, and on it alone), or have no gradient. It takes one all-reduce of a few numbers per process group:
    one in all after `apply_plan`, and one more, of the gradients themselves, where some are partial. The host waits
    for the device once, at the end.

    Args:
        parameters: parameters, or one of them; every rank passes the same ones in the same order.
        dp_cp_group, tp_group: not needed, whatever is passed; they are here because NeMo-RL's function takes them.
        norm_type: order of the norm, positive; ``inf`` (or ``"inf"``) for the largest absolute value.
        dtype: in which up to ROW powers are added up; these sums are added up in fp64.

    Returns:
        The norm; 0.0 where nothing has a gradient. NaN if any rank has a NaN.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be positive, not {norm_type}")
    with torch.no_grad():
        parts = [_part(parameter) for parameter in _listed(parameters)]
        _complete([part for part in parts if part.partial], dtype)
        totals = _over_ranks(_own_totals(parts, order, dtype), order)
        if not totals:
            return 0.0
        device = totals[0].device
        stacked = torch.stack([total.to(device) for total in totals])
        return stacked.max().item() if order == inf else stacked.sum().item() ** (1 / order)


def clip_grad_by_total_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_grad_norm: float,
    total_norm: float | Tensor,
    dtype: torch.dtype = torch.float32,  # noqa: ARG001 - NeMo-RL's signature
    *,
    error_if_nonfinite: bool = False,
) -> None:
    """Scale gradients in place, in their own dtype, by ``min(1, max_grad_norm / (total_norm + 1e-6))``.

    A norm that is not finite does what it does in `torch.nn.utils.clip_grad_norm_`: an infinite one makes every finite
    gradient zero, NaN makes every gradient NaN, so that the next loss shows it; ``error_if_nonfinite`` raises instead.

    Args:
        parameters: parameters, or one of them; those without a gradient are passed over.
        max_grad_norm: the largest norm that is left as it is.
        total_norm: of all ranks' gradients, as `get_grad_norm` returns it. A tensor stays on its device: the host waits
            for it only to raise.
        dtype: not needed: NeMo-RL's function takes it, and scales a copy where it is not the gradients' own.
        error_if_nonfinite: raise where ``total_norm`` is infinite or NaN; gradients are then untouched.

    Raises:
        RuntimeError: ``total_norm`` is not finite, and ``error_if_nonfinite``.
    """
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    if error_if_nonfinite and not isfinite(total_norm):
        raise RuntimeError(f"the gradients' total norm is {float(total_norm)}: they cannot be clipped")
    coefficient = max_grad_norm / (total_norm + EPSILON)
    if isinstance(coefficient, Tensor):
        coefficient = coefficient.clamp(max=1)  # keeps NaN
    elif coefficient >= 1:  # not for NaN
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in _listed(parameters):
        if parameter.grad is not None:
            gradient = to_local_if_dtensor(parameter.grad)
            alike[gradient.device, gradient.dtype].append(gradient)
    with torch.no_grad():
        for (device, _), gradients in alike.items():
            factor = coefficient.to(device) if isinstance(coefficient, Tensor) else coefficient
            torch._foreach_mul_(gradients, factor)


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without its history; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------- what one rank holds


@dataclass(slots=True)
class _Part:
    """This rank's part of one gradient.

    Attributes:
        local: the part; None where there is no gradient, whose collectives this rank joins all the same.
        mesh: None for a plain tensor.
        sharded: dims of the mesh over which the parts differ and belong together.
        partial: dims over which the parts must be reduced first, by operation.
    """

    local: Tensor | None
    mesh: DeviceMesh | None = None
    sharded: Dims = ()
    partial: dict[str, Dims] | None = None


def _part(parameter: Tensor) -> _Part:
    gradient = parameter.grad
    laid_out = parameter if gradient is None else gradient
    if not isinstance(laid_out, DTensor):
        return _Part(gradient)
    mesh = laid_out.device_mesh
    placed = [(dim, place) for dim, place in enumerate(laid_out.placements) if mesh.size(dim) > 1]
    partial: dict[str, Dims] = defaultdict(tuple)
    for dim, place in placed:
        if place.is_partial():
            partial[place.reduce_op] += (dim,)  # type: ignore[attr-defined]  # Partial has it
    sharded = tuple(dim for dim, place in placed if not place.is_partial() and not place.is_replicate())
    return _Part(None if gradient is None else to_local_if_dtensor(gradient), mesh, sharded, partial)


def _complete(parts: list[_Part], dtype: torch.dtype) -> None:
    """Replace partial gradients by their reductions: one flat collective for all that share groups and operation."""
    sharing: dict[tuple[Groups, str], list[_Part]] = defaultdict(list)
    for part in parts:
        for operation, dims in (part.partial or {}).items():
            assert part.mesh is not None
            if part.local is not None:
                sharing[_compat.groups_over(part.mesh, dims), operation].append(part)
    for (groups, operation), members in sharing.items():
        mesh = members[0].mesh
        assert mesh is not None
        flat = torch.cat([_local(part).flatten().to(mesh.device_type, dtype) for part in members])
        for group in groups:
            flat = _compat.all_reduce(flat, group, "sum" if operation == "avg" else operation)
        if operation == "avg":  # gloo has no mean
            flat /= prod(mesh.size(dim) for dim in (members[0].partial or {})[operation])
        for part, whole in zip(members, flat.split([_local(part).numel() for part in members]), strict=True):
            part.local = whole


def _local(part: _Part) -> Tensor:
    assert part.local is not None
    return part.local


# ---------------------------------------------------------------- adding up


def _own_totals(parts: list[_Part], order: float, dtype: torch.dtype) -> dict[Groups, Tensor]:
    """This rank's sums of powers (its maxima), by the groups over which they are still to be reduced.

    All gradients of a mesh go over the axes that any of them is sharded on. One that is replicated on some of these
    axes contributes a share, so that the replicas add up to it.
    """
    axes: dict[DeviceMesh | None, set[int]] = defaultdict(set)
    for part in parts:
        axes[part.mesh].update(part.sharded)
    rows: dict[tuple[DeviceMesh | None, int], list[Tensor]] = defaultdict(list)
    for part in parts:
        replicas = prod(part.mesh.size(dim) for dim in axes[part.mesh].difference(part.sharded)) if part.mesh else 1
        if part.local is not None and part.local.numel():
            rows[part.mesh, replicas] += _row_norms(part.local, order, dtype)
    totals: dict[Groups, Tensor] = {}
    for mesh, dims in axes.items():
        groups = _compat.groups_over(mesh, tuple(sorted(dims))) if mesh else ()
        shares = [_total(norms, order, replicas) for (owner, replicas), norms in rows.items() if owner == mesh]
        device = mesh.device_type if mesh else shares[0].device if shares else "cpu"
        start = totals.get(groups, torch.zeros((), dtype=torch.float64, device=device))
        together = torch.stack([start, *(share.to(device) for share in shares)])
        totals[groups] = together.amax() if order == inf else together.sum()
    return totals


def _row_norms(local: Tensor, order: float, dtype: torch.dtype) -> Iterator[Tensor]:
    """Norms of ROW elements each, and of the rest; torch may copy up to PIECE elements to ``dtype`` for it."""
    flat = local.reshape(-1)
    whole = flat.numel() // ROW * ROW
    for piece in (*flat[:whole].split(PIECE), flat[whole:]):
        if piece.numel():
            yield torch.linalg.vector_norm(piece.view(-1, min(ROW, piece.numel())), order, dim=1, dtype=dtype)


def _total(row_norms: list[Tensor], order: float, replicas: int) -> Tensor:
    norms = torch.cat([norms.to(row_norms[0].device) for norms in row_norms])
    norm: Tensor = torch.linalg.vector_norm(norms, order, dtype=torch.float64)
    return norm if order == inf else norm**order / replicas


def _over_ranks(totals: dict[Groups, Tensor], order: float) -> list[Tensor]:
    """Reduce each total over its groups: one all-reduce per group, with all totals that need it."""
    for group in dict.fromkeys(group for groups in totals for group in groups):
        members = [groups for groups in totals if group in groups]
        own = torch.stack([totals[groups] for groups in members])
        reduced = _maximum(own, group) if order == inf else _compat.all_reduce(own, group)
        totals.update(zip(members, reduced, strict=True))
    return list(totals.values())


def _maximum(totals: Tensor, group: str) -> Tensor:
    """A NaN on any rank makes NaN, where a maximum of floats drops it: as integers, the bits of NaN are the largest."""
    return _compat.all_reduce(totals.abs().view(torch.int64), group, "max").view(torch.float64)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
