"""What a module counts of what is cut: on each rank its attributes, or those of its config, give the rank's share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardplan.compiled import LocalSize
from shardplan.parallel.collectives import Ranks


class LocalConfig:
    """A model's config with some fields of its own; everything else is read from, and written to, the config."""

    def __init__(self, config: Any, own: dict[str, int]) -> None:
        self.__dict__.update(_config=config, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name in ("_config", "_own"):  # before __init__: a copy or an unpickling
            raise AttributeError(name)
        return self._own[name] if name in self._own else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


def localise(module: nn.Module, sizes: Iterable[LocalSize], ranks: Ranks) -> None:
    """Set attributes that count what is cut to this rank's share."""
    of_config: dict[str, int] = {}
    for size in sizes:
        share = share_of(size, ranks.rank)
        if size.of_config:
            of_config[size.name] = share
        else:
            setattr(module, size.name, share)
    if of_config:
        module.config = LocalConfig(module.config, of_config)  # type: ignore[assignment]  # transformers' attribute


def share_of(size: LocalSize, rank: int) -> int:
    """As DTensor chunks: ceil(total / parts) for each rank but the last ones, which may have less."""
    chunk = -(-size.total // size.parts)
    return max(0, min(chunk, size.total - rank % size.parts * chunk))
