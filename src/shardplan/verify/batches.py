"""What both models of a proof are run on: the unsharded one on all rows, a rank on those of its place in dp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardplan.mesh import TP

ROWS = 2  # for each dp rank


@dataclass(frozen=True)
class Batches:
    """Random ids and labels, the same on every rank."""

    mesh: DeviceMesh
    seed: int
    vocabulary: int

    def batch(self, length: int, masked: bool, number: int) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and labels, (rows, length); with ``masked`` every other row ends in padding."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        rows = ROWS * self._dp_size()
        ids = torch.randint(0, self.vocabulary, (rows, length), generator=generator)
        inputs = {"input_ids": ids}
        if masked:
            inputs["attention_mask"] = torch.ones_like(ids)
            inputs["attention_mask"][::2, 2 * length // 3 :] = 0
        return inputs, torch.randint(0, self.vocabulary, ids.shape, generator=generator)

    def _data_axes(self) -> list[str]:
        return [name for name in self.mesh.mesh_dim_names or () if name != TP]

    def _dp_size(self) -> int:
        size = 1
        for axis in self._data_axes():
            size *= self.mesh[axis].size()
        return size

    def own_rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of all of them."""
        for axis in self._data_axes():
            tensor = tensor.chunk(self.mesh[axis].size())[self.mesh.get_local_rank(axis)]
        return tensor

    def own(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.own_rows(value) for name, value in inputs.items()}

    def mean(self, loss: Tensor) -> float:
        """Over the dp ranks, which have a loss each; every rank calls it."""
        value = whole(loss).clone()
        for axis in self._data_axes():
            dist.all_reduce(value, group=self.mesh.get_group(axis))
            value = value / self.mesh[axis].size()
        return float(value.item())


def whole(tensor: Any) -> Tensor:
    """Gathered, where it is a DTensor."""
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered
