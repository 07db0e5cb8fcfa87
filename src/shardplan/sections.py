"""Packed parameters: which sections lie side by side along the dim that is cut, and how long each of them is.

A plan names them in order, each with a size: ``[gate: intermediate_size, up: intermediate_size]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardplan.inventory import Inventory

# Sums of products of whole numbers and names; one language for plan files and their JSON Schema.
_TERM = r"([A-Za-z_][A-Za-z0-9_]*|[0-9]{1,9})"
SIZE_REGEX = rf"^ *{_TERM}( *[*+] *{_TERM}){{0,15}} *(?!\n)$"
LARGEST = 999_999_999
NAME_REGEX = r"^[A-Za-z][A-Za-z0-9]*(?!\n)$"


@dataclass(frozen=True, slots=True)
class Section:
    """One section: its name, and its size as a plan writes it."""

    name: str
    size: str

    def __str__(self) -> str:
        return f"{self.name}: {self.size}"

    @property
    def is_number(self) -> bool:
        return self.size.strip().isdigit()

    def length(self, lookup: Callable[[str], int | None]) -> int:
        """Its entries along the packed dim.

        Args:
            lookup: the value of a name; None where nobody knows it.

        Raises:
            UnknownSizeError: with the name that ``lookup`` does not know.
        """
        return sum(prod(_value(factor, lookup) for factor in term.split("*")) for term in self.size.split("+"))


class UnknownSizeError(ValueError):
    """A name that neither the modules around nor the config know; it is the exception's argument."""


def section_lengths(sections: Sequence[Section], inventory: Inventory, fqn: str, whole: int) -> tuple[int, ...]:
    """How long the sections of the module ``fqn`` are along a dim of ``whole`` entries.

    Numbers alone are shares: ``gate: 1, up: 1`` are two halves, whatever the size of the model.

    Raises:
        UnknownSizeError: as for `Section.length`.
    """
    lengths = tuple(section.length(partial(inventory.size, fqn=fqn)) for section in sections)
    total = sum(lengths)
    shares = bool(total) and all(section.is_number for section in sections)
    divides = shares and all(whole * length % total == 0 for length in lengths)
    return tuple(whole * length // total for length in lengths) if divides else lengths


def _value(factor: str, lookup: Callable[[str], int | None]) -> int:
    name = factor.strip()
    if name.isdigit():
        return int(name)
    if (found := lookup(name)) is None:
        raise UnknownSizeError(name)
    return found


def parse_section(name: str, size: str | int) -> Section:
    """Read one section.

    Raises:
        ValueError: the name or the size is not of the form that a plan may write.
    """
    text = str(size)
    if not re.search(NAME_REGEX, name):
        raise ValueError(f"'{name}' is not a name for a section: write letters and digits, a letter first")
    if not re.search(SIZE_REGEX, text):
        raise ValueError(f"'{text}' is not a size: write numbers and names of config fields with * and + between them")
    return Section(name, text)
