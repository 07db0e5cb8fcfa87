"""One style as a torch `ParallelStyle`, for `torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from shardplan.checks.kinds import check_kinds
from shardplan.checks.names import nearest
from shardplan.checks.sizes import check_dims
from shardplan.checks.target import Target
from shardplan.compiled import CompiledPlan
from shardplan.diagnostics import Diagnostic, PlanError
from shardplan.from_python import plan_from_dict
from shardplan.inventory import take_inventory
from shardplan.lower import lower
from shardplan.mesh import MeshSpec
from shardplan.parallel.collectives import Ranks
from shardplan.parallel.gradients import Owner, sum_in_graph
from shardplan.parallel.stream import Stream
from shardplan.parallel.style import LocalStyle
from shardplan.resolve import resolve
from shardplan.styles import STYLES


def translate_parallel_style(style: str) -> ParallelStyle:
    """The torch ``ParallelStyle`` that a style string means when it stands alone, as NeMo-RL's function of this name.

    Args:
        style: a name of transformers, past or present, or one of this project's.

    Returns:
        A style for `parallelize_module`: inputs and outputs are local tensors, parameters become DTensors over the
        mesh. ``sequence_parallel`` takes and gives this rank's part of the sequence.

    Raises:
        PlanError: SP101, an unknown name.
    """
    if style not in STYLES:
        close = nearest(style, STYLES)
        hint = f"did you mean {close[0]}?" if close else ""
        known = ", ".join(STYLES)
        raise PlanError([Diagnostic("SP101", f"unknown style '{style}'", None, style, f"one of {known}", hint)])
    return StandaloneStyle(style)


class StandaloneStyle(ParallelStyle):
    """Compiles a plan of one rule for the module that it is applied to."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style

    def __repr__(self) -> str:
        return f"StandaloneStyle({self.style!r})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        compiled = self._compile(module, device_mesh.size())
        ranks = Ranks(device_mesh.get_group().group_name, device_mesh.get_local_rank(), device_mesh.size())
        stream = Stream(ranks, sequence_parallel=True, cut=True)
        for part in compiled.modules:
            LocalStyle(part, stream)._apply(module.get_submodule(part.path), device_mesh)
        summed = compiled.summed_parameters()
        owners: list[Owner] = [(module.get_submodule(part.path), parameter.name) for part, parameter in summed]
        sum_in_graph(module, owners, ranks)
        return module

    def _compile(self, module: nn.Module, tp: int) -> CompiledPlan:
        mesh = MeshSpec((("tp", tp),))
        resolved = resolve(plan_from_dict({".": self.style}), take_inventory(module))
        target = Target(resolved, mesh, sequence_parallel=False)
        findings = [*check_kinds(target), *check_dims(target)]  # the others ask what is around the module
        if findings:
            raise PlanError(findings)
        return lower(resolved, mesh, sequence_parallel=True)
