"""A tensor of the unsharded model, of which a rank holds pieces, as torch.distributed.checkpoint takes it.

A packed weight is kept in sections, each a DTensor of its own. A checkpoint holds the whole one under its own name, so
that neither the tp degree nor the plan's sections show in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardplan.checkpoint.lazy import Box


class Pieces(Tensor):
    """See above; it has no values of its own. The three methods are what `torch.distributed.checkpoint` asks for."""

    pieces: tuple[tuple[Box, Tensor], ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[tuple[Box, Tensor]]) -> Pieces:
        """``pieces``: where each lies in the whole, and its values, which are read and written in place."""
        whole: Pieces = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        whole.pieces = tuple((box, values) for box, values in pieces if values.numel())
        return whole

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes options
        return f"Pieces({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves its own without types
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on a tensor of a checkpoint, which has no values of its own")

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(values), self.size()),
            )
            for chunk, (_, values) in zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(_offsets(box), values.size()) for box, values in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(values for box, values in self.pieces if _offsets(box) == index.offset)


def _offsets(box: Box) -> torch.Size:
    return torch.Size([along.start for along in box])
