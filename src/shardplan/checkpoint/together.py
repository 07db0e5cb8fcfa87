"""Ranks that read or write one folder succeed together or fail together, with one message."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """Weights or a checkpoint could not be read or written; the same on every rank that took part."""


class LostRankError(CheckpointError):
    """A collective ended because another process did; where it did, the error that this one was raised from says."""

    def __init__(self, doing: str) -> None:
        super().__init__(f"{doing}: a rank was lost: its process ended, and its own output says why")


def is_loss(error: BaseException) -> bool:
    """Whether it is what gloo and NCCL raise when a peer closes its connection; gloo's has no type of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class Ranks:
    """The ranks that hold one model, one process group for each axis of its mesh; none where a rank is alone."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = tuple(groups)

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
        widest = max(meshes, key=lambda mesh: mesh.ndim, default=None)
        return cls([group for group in widest.get_all_groups() if group.size() > 1] if widest is not None else ())

    @classmethod
    def of_world(cls) -> Ranks:
        """All that there are."""
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        return cls([group] if group is not None else [])

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.gather(None, "cannot count the ranks"))

    @property
    def rank(self) -> int:
        """This one's number among all ranks that there are."""
        return dist.get_rank() if self.groups else 0

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once."""
        return all(group.rank() == 0 for group in self.groups)

    def gather(self, value: T, doing: str) -> list[T]:
        """Every rank's value, in order of rank.

        Args:
            doing: as for `together`.

        Raises:
            LostRankError: a rank is gone.
        """
        numbered: list[tuple[int, T]] = [(self.rank, value)]
        for group in self.groups:
            of_all: list[list[tuple[int, T]]] = [[]] * group.size()
            try:
                dist.all_gather_object(of_all, numbered, group=group)
            except RuntimeError as error:
                raise LostRankError(doing) from error
            numbered = [pair for pairs in of_all for pair in pairs]
        return [value for _, value in sorted(numbered, key=lambda pair: pair[0])]

    def require_same(self, value: str, doing: str, problem: str) -> None:
        """
        Args:
            value: what has to be the same on every rank.
            doing: as for `together`; the first rank's counts.
            problem: what is wrong where it is not.

        Raises:
            CheckpointError: on every rank, with all values and the ranks that have them.
        """
        values = self.gather((self.rank, value), doing)
        first, *_ = self.gather(doing, doing)
        if len({value for _, value in values}) > 1:
            raise CheckpointError(f"{first}: {problem}: {_by_words(values)}")

    def together(self, doing: str) -> Together:
        """A context that a rank leaves without an error only where all of them do; no collective may stand inside.

        Args:
            doing: what cannot be done where it fails, for the message: ``"cannot read DIR"``.
        """
        return Together(self, doing)


class Together:
    """See `Ranks.together`."""

    def __init__(self, ranks: Ranks, doing: str) -> None:
        self._ranks = ranks
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception | CheckpointException):
            return  # an interruption: this process ends
        said = self._ranks.gather((self._ranks.rank, _words(error)), self._doing)
        if any(words for _, words in said):
            raise CheckpointError(f"{self._doing}: {_joined(said)}") from error


def _words(error: BaseException | None) -> str:
    """Empty without an error. What a user can do something about speaks for itself; a bug of ours says what it is."""
    if error is None:
        return ""
    if isinstance(error, CheckpointException):  # torch.distributed.checkpoint's, which all ranks get alike
        return _by_words([(rank, str(failure[0])) for rank, failure in sorted(error.failures.items())])
    plain = isinstance(error, OSError | ValueError | CheckpointError | SafetensorError)
    return str(error) if plain else f"{type(error).__name__}: {error}"


def _joined(said: Sequence[tuple[int, str]]) -> str:
    """Once what all ranks say; otherwise with the ranks that say it."""
    different = dict.fromkeys(words for _, words in said if words)
    if len(different) == 1 and all(words for _, words in said):
        return next(iter(different))
    return _by_words([(rank, words) for rank, words in said if words])


def _by_words(said: Sequence[tuple[int, str]]) -> str:
    """Each thing once, with the ranks that say it."""
    by_words: dict[str, list[str]] = {}
    for rank, words in said:
        by_words.setdefault(words, []).append(str(rank))
    return "; ".join(f"{words} (rank {', '.join(ranks)})" for words, ranks in by_words.items())
