"""Low-rank adapters beside a linear that is cut: cut along with it, so that their sum is one rank's part, too.

Hu et al. 2021: y = W x + B A x. Where W is cut over its output, so is B, and A is whole; where W is cut over its input,
so is A, and B, being linear, makes its part of the sum out of what A gives in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardplan.checks.names import last
from shardplan.inventory import Inventory
from shardplan.styles import STYLES, Split, Style

DOWN, UP = "lora_A", "lora_B"  # PEFT's dicts of linears by the adapter's name
_WHOLE = STYLES["replicated_with_grad_allreduce"]


def adapter_parts(style: Style, fqn: str, inventory: Inventory) -> Iterator[tuple[str, Style]]:
    """Parts for the adapters of the linear ``fqn``, should it have some and ``style`` cut it."""
    if style.split not in (Split.OUTPUT, Split.INPUT):
        return
    cut = replace(style, input=None, output=None)
    down, up = (_WHOLE, cut) if style.split is Split.OUTPUT else (replace(cut, sections=()), _WHOLE)
    for name, part in ((DOWN, down), (UP, up)):
        for adapter in inventory.children.get(f"{fqn}.{name}", ()):
            yield f"{name}.{last(adapter.fqn)}", part


def has_adapters(fqn: str, inventory: Inventory) -> bool:
    return any(inventory.children.get(f"{fqn}.{name}") for name in (DOWN, UP))
