"""The kernels of mamba-ssm and causal-conv1d in plain torch, so that Mamba-2 mixers take their fused path on CPU.

On that path a mixer calls neither ``out_proj`` nor ``norm`` nor ``conv1d``: their weights go to one kernel, which reads
its sizes off the tensors. Like Triton, the stand-ins take plain tensors alone.

Kernels for decoding from a cache have none: transformers then falls back to its own torch code, as for any function
that an installed package lacks.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.nemotron_h import modeling_nemotron_h

Limit = tuple[float, float]
NO_LIMIT = (0.0, float("inf"))


@contextmanager
def installed() -> Iterator[Counter[str]]:
    """NemotronH as if both packages were installed; counts the calls of each kernel. The kernels differ from
    transformers' own code where padding comes before tokens, see tests/test_mamba_kernels.py.

    transformers 5.24 looks the packages up when a modeling file is imported. Here the same look-up runs again.
    """
    calls: Counter[str] = Counter()
    module_globals = vars(modeling_nemotron_h)
    before = {name: module_globals[name] for name in KERNELS}
    packages: dict[str, Any] = {package: ModuleType(package) for package, _ in KERNELS.values()}
    for package, kernel in KERNELS.values():
        setattr(packages[package], kernel.__name__, _counted(kernel, calls))
    absent = [package for package in packages if package not in sys.modules]
    assert len(absent) == len(packages), "the stand-ins are for where the kernels are not installed"
    try:
        sys.modules.update(packages)
        for name, (package, kernel) in KERNELS.items():
            look_up = use_kernel_func_from_hub_with_fallback(kernel.__name__, package)
            module_globals[name] = look_up(before[name].__wrapped__)
        yield calls
    finally:
        module_globals.update(before)
        for package in absent:
            sys.modules.pop(package, None)


def _counted(kernel: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(kernel)  # and with it the signature, by which transformers chooses what to pass
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[kernel.__name__] += 1
        if any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
            raise TypeError(f"{kernel.__name__} reads memory by its address: no DTensor")
        return kernel(*args, **kwargs)

    return counted


# ---------------------------------------------------------------- the kernels, with the signatures of mamba-ssm 2


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: None = None, activation: str | None = None
) -> Tensor:
    """``x``: (batch, dim, length), ``weight``: (dim, width)."""
    assert activation in (None, "silu", "swish")
    dim, width = weight.shape
    out = F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], bias, groups=dim)
    return out if activation is None else F.silu(out)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - the kernel's names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: None = None,
    dt_softplus: bool = False,
    dt_limit: Limit = NO_LIMIT,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One step after the other, in fp32, where transformers goes by chunks.

    ``x``: (batch, length, heads, head dim), ``dt``: (batch, length, heads), ``A``, ``D``, ``dt_bias``: (heads),
    ``B``, ``C``: (batch, length, groups, state size). Returns the shape of ``x``.
    """
    batch, length, heads, head_dim = x.shape
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    of_head = [projected.float().repeat_interleave(heads // B.shape[2], dim=2) for projected in (B, C)]
    state = x.new_zeros(batch, heads, head_dim, B.shape[3], dtype=torch.float32)
    state = state if initial_states is None else initial_states.float()
    outputs = []
    for now in range(length):
        decay = (A.float() * dt[:, now]).exp()
        entering = (x[:, now].float() * dt[:, now, :, None])[..., None] * of_head[0][:, now, :, None]
        state = state * decay[..., None, None] + entering
        outputs.append((state * of_head[1][:, now, :, None]).sum(-1))
    out = torch.stack(outputs, dim=1)
    out = out if D is None else out + x.float() * D.float()[:, None]
    out = (out if z is None else out * F.silu(z.float())).to(x.dtype)
    return (out, state) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: None = None,
    dt_limit: Limit = NO_LIMIT,
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Convolution, scan, gated norm and output projection of ``zxbcdt``: (batch, length, 2 dim + 2 groups x state size
    + heads). Heads and state size are those of ``D`` and ``conv1d_weight``; a norm's group is dim / ``ngroups`` wide.
    """
    assert rmsnorm_weight is not None, "what NemotronH asks for"
    assert headdim is not None
    assert not norm_before_gate
    assert not return_final_states
    (heads,) = D.shape
    dim = heads * headdim
    assert heads % ngroups == 0, f"{heads} heads in {ngroups} groups"
    state_size = (conv1d_weight.shape[0] - dim) // ngroups // 2
    assert zxbcdt.shape[-1] == 2 * dim + 2 * ngroups * state_size + heads, (
        "the input's width does not go with heads and groups"
    )
    assert conv1d_weight.shape[0] == dim + 2 * ngroups * state_size
    assert dt_bias.shape == A.shape == (heads,)
    assert rmsnorm_weight.shape == (dim,)
    z, x_and_states, dt = zxbcdt.split([dim, dim + 2 * ngroups * state_size, heads], dim=-1)
    convolved = causal_conv1d_fn(x_and_states.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation)
    x, *states = convolved.transpose(1, 2).split([dim, ngroups * state_size, ngroups * state_size], dim=-1)
    b, c = (projected.unflatten(-1, (ngroups, state_size)) for projected in states)
    x = x.unflatten(-1, (heads, headdim))
    scanned = mamba_chunk_scan_combined(
        x, dt, A, b, c, chunk_size, D, None, dt_bias, initial_states, None, True, dt_limit
    )
    assert isinstance(scanned, Tensor)
    gated = (scanned.flatten(-2).float() * F.silu(z.float())).unflatten(-1, (ngroups, dim // ngroups))
    normed = gated * (gated.square().mean(-1, keepdim=True) + rmsnorm_eps).rsqrt()
    out = (normed.flatten(-2) * rmsnorm_weight.float()).to(x.dtype)
    return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)


# The name in transformers' modeling file -> the package and its kernel.
KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": ("causal_conv1d", causal_conv1d_fn),
    "mamba2_chunk_scan": ("mamba_ssm", mamba_chunk_scan_combined),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm", mamba_split_conv1d_scan_combined),
}
