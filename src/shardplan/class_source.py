"""What the methods of a class do, read from their source: a module tells its sizes, but not how it uses them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from inspect import getsource, isfunction, unwrap


@cache
def used_by_methods(cls: type) -> frozenset[str]:
    """Attributes of ``self`` that a class's methods use, ``config.`` before those of its config."""
    return frozenset(found for source in _sources(cls) for found in re.findall(r"\bself\.((?:config\.)?\w+)", source))


@cache
def splits_by(cls: type) -> frozenset[str]:
    """Attributes of ``self`` by which a class's methods split an activation."""
    return frozenset(name for source in _sources(cls) for name in re.findall(r"\.split\(\s*self\.(\w+)", source))


@cache
def interleaves(cls: type) -> bool:
    """Whether what is packed in one projection takes turns in a class's methods.

    They view it as heads of three, ``3 * head_size``, ``num_heads, 3, head_dim``, or take every second feature.
    """
    form = re.compile(r"3 \* self\.head_(?:size|dim)|num_heads, 3,|\.\.\., (?:0|1)?::2\]")
    return any(form.search(source) for source in _sources(cls))


@cache
def reads_children(cls: type) -> bool:
    """Whether a class's methods use ``self.child.weight`` or a child's bias."""
    return any(re.search(r"\bself\.\w+\.(weight|bias)\b", source) for source in _sources(cls))


@cache
def methods_reading(cls: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """Methods beside ``forward`` that compute with attributes ``names`` of ``self``, or with a child's weight or bias.

    Those that set weights want them whole.
    """
    own = rf"\bself\.(?:{'|'.join(map(re.escape, names))})\b|" if names else ""
    form = re.compile(rf"{own}\bself\.\w+\.(?:weight|bias)\b")
    return tuple(name for name, source in _methods(cls).items() if not name.startswith(_OTHERS) and form.search(source))


_OTHERS = ("forward", "reset", "init", "_init", "__", "extra_repr")


def _sources(cls: type) -> tuple[str, ...]:
    return tuple(_methods(cls).values())


@cache
def _methods(cls: type) -> Mapping[str, str]:
    """Sources of methods by name, ``__init__`` aside; as far as they are there: a class typed at a prompt has none."""
    found: dict[str, str] = {}
    for owner in cls.__mro__:
        if owner.__module__.startswith("torch.") or owner is object:
            continue
        for name, method in vars(owner).items():
            if isfunction(method) and name != "__init__" and name not in found:
                with suppress(OSError):
                    found[name] = getsource(unwrap(method))
    return found
