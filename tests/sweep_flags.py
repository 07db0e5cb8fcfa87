"""Boolean fields of a configuration, flipped one at a time: those that change what is built, or its logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from shardplan.checks.names import general
from shardplan.diagnostics import PlanError
from shardplan.verify.shrink import shrink
from shardplan.verify.weights import randomise

# Of the class that all configurations derive from, or nearly all have: they ask for more output, or for a cache, or are
# for other kinds of models.
OF_EVERY_MODEL = frozenset((*vars(PreTrainedConfig()), "use_cache")) - {"tie_word_embeddings"}
SEED, LENGTH, RANKS = 7, 16, 2


def booleans(config: Any) -> Iterator[tuple[str, bool]]:
    """The fields that may be flipped, with their values."""
    for name, value in vars(config).items():
        if isinstance(value, bool) and not name.startswith("_") and name not in OF_EVERY_MODEL:
            yield name, value


def changes(default: nn.Module, flipped: nn.Module) -> bool:
    """Whether the models have other modules, parameters or ties, or small ones with the same weights other logits."""
    return _parts(default) != _parts(flipped) or _differ(default, flipped)


def _parts(model: nn.Module) -> set[tuple[str, ...]]:
    modules = {(general(name), type(module).__name__) for name, module in model.named_modules()}
    parameters = {(general(name), str(tuple(parameter.shape))) for name, parameter in model.named_parameters()}
    return {*modules, *parameters}


def _differ(default: nn.Module, flipped: nn.Module) -> bool:
    """In training or in evaluation mode; what cannot be made small or raises does differ."""
    try:
        logits = [_logits(model) for model in (default, flipped)]
    except (PlanError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError):
        return True
    return any(not torch.equal(one, other) for one, other in zip(*logits, strict=True))


def _logits(model: nn.Module) -> list[torch.Tensor]:
    build = shrink(model, RANKS, RANKS)
    torch.manual_seed(SEED)
    small: Any = build()
    randomise(small, SEED)
    vocabulary = small.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(SEED))
    given = []
    for mode in (True, False):
        torch.manual_seed(SEED)  # for what is drawn in a forward
        with torch.no_grad():
            given.append(small.train(mode)(input_ids=ids, use_cache=False).logits)
    return given
