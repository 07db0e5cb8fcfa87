"""Where things stand in a language model of transformers: lists of layers, their children, the final norm, towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardplan.hf.styles import Meaning
from shardplan.inventory import Inventory, ModuleInfo, ancestors
from shardplan.styles import Kind

HYPER = "Hyper"  # in the class names of hyper-connections, and of what makes one stream of theirs behind the layers
CUT_IN_LAYERS = (Meaning.CUT_OUTPUT, Meaning.CUT_INPUT, Meaning.GATHERED_OUTPUT, Meaning.EXPERTS)


@dataclass(frozen=True)
class Structure:
    """A model by where its parts stand; ``meant`` is what is to be done to modules and parameters."""

    inventory: Inventory
    meant: Mapping[str, Meaning]

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """The lists of decoder layers: the outermost ones around what transformers' plan cuts."""
        found: dict[str, None] = {}
        for name, meaning in self.meant.items():
            if meaning in CUT_IN_LAYERS:
                around = [fqn for fqn in ancestors(name) if self.inventory.by_fqn[fqn].container]
                found |= dict.fromkeys(around[-1:])
        return tuple(found)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(
            m.fqn for m in self.inventory.modules if m.fqn and next(ancestors(m.fqn)) in self.lists and not m.container
        )

    @cached_property
    def children_of_layers(self) -> tuple[ModuleInfo, ...]:
        """What a layer consists of, and the members of lists among that."""
        found = []
        for module in self.inventory.modules:
            around = [fqn for fqn in ancestors(module.fqn) if not self.inventory.by_fqn[fqn].container]
            if module.fqn and not module.container and around[0] in self.layers:
                found.append(module)
        return tuple(found)

    @cached_property
    def beside_layers(self) -> frozenset[str]:
        around = {next(ancestors(layers), "") for layers in self.lists}
        return frozenset(m.fqn for m in self.inventory.modules if m.fqn and next(ancestors(m.fqn)) in around)

    @property
    def ends_of_stream(self) -> frozenset[str]:
        """Modules beside the layers that run before the stream ends: what makes one stream of several."""
        return frozenset(fqn for fqn in self.beside_layers if HYPER in self.inventory.by_fqn[fqn].class_name)

    def below(self, fqn: str) -> tuple[ModuleInfo, ...]:
        prefix = f"{fqn}."
        return tuple(module for module in self.inventory.modules if module.fqn.startswith(prefix))

    def meanings(self, fqn: str) -> set[Meaning]:
        """Of a module and everything below it."""
        return {meaning for name, meaning in self.meant.items() if f"{name}.".startswith(f"{fqn}.")}

    @cached_property
    def final_norm(self) -> str | None:
        """The last norm among the siblings of the layers."""
        if not self.lists:
            return None
        around = next(ancestors(self.lists[0]), "")
        siblings = [m for m in self.inventory.modules if m.fqn and next(ancestors(m.fqn)) == around]
        norms = [m.fqn for m in siblings if not m.container and (is_norm(self.inventory, m) or _is_bare_norm(m))]
        behind = [fqn for fqn in norms if self._order[fqn] > self._order[self.lists[0]]]
        return behind[0] if behind else norms[-1] if norms else None

    @cached_property
    def tables_of_words(self) -> tuple[str, ...]:
        """The input embedding, and Embeddings beside it with about as many rows: Gemma 4 has one for all its layers."""
        embedding = self.inventory.by_fqn.get(self.inventory.embedding or "")
        if embedding is None or embedding.kind is not Kind.EMBEDDING:
            return ()
        beside = self.inventory.children[next(ancestors(embedding.fqn))]
        # One with a norm inside would norm a part of what it looks up.
        tables = [
            m for m in beside if m.kind is Kind.EMBEDDING and not any(below.parameters for below in self.below(m.fqn))
        ]
        return tuple(table.fqn for table in tables if 2 * table.features[0] > embedding.features[0])

    def meets_stream(self, child: ModuleInfo) -> tuple[bool, bool]:
        """Whether a layer's child takes the stream, and gives it: a Linear into another width and one out of it do one.

        Gemma 4 has such a pair, around a product with an input that layers have for each token.
        """
        if not child.kind.is_linear or self.width is None or self.width not in child.features:
            return True, True
        gives, takes = child.features
        return takes == self.width, gives == self.width

    @cached_property
    def width(self) -> int | None:
        """Of the stream, which the final norm knows."""
        norm = self.inventory.by_fqn[self.final_norm] if self.final_norm else None
        return norm.parameters[0].shape[0] if norm and norm.parameters and norm.parameters[0].shape else None

    @cached_property
    def _order(self) -> dict[str, int]:
        return {module.fqn: number for number, module in enumerate(self.inventory.modules)}


def language_model(inventory: Inventory) -> str:
    """What names of the language model start with: the rest of a model that sees or hears stays whole over tp."""
    around = next(ancestors(inventory.embedding), "") if inventory.embedding else ""
    return f"{around}." if around else ""


def owns_parameters(inventory: Inventory, fqn: str) -> bool:
    return any(p.fqn.startswith(f"{fqn}.") for p in inventory.parameters)


def is_token_wise(inventory: Inventory, module: ModuleInfo) -> bool:
    """Norms, and hyper-connections (Zhu et al. 2024), which mix the streams of one token with each other."""
    return is_norm(inventory, module) or HYPER in module.class_name


def is_norm(inventory: Inventory, module: ModuleInfo) -> bool:
    """Vectors alone, and nothing below that has parameters."""
    below = any(p.fqn.startswith(f"{module.fqn}.") for m in inventory.modules if m is not module for p in m.parameters)
    own = module.parameters
    return bool(own) and not below and all(len(p.shape) <= 1 for p in own)


def _is_bare_norm(module: ModuleInfo) -> bool:
    """A norm without weights, as OLMo's."""
    return "Norm" in module.class_name and not module.parameters


def tower_layers(inventory: Inventory) -> tuple[str, ...]:
    """Members of the outermost lists beside the language model, where they have parameters."""
    base = language_model(inventory)
    found = []
    for module in inventory.modules:
        around = [fqn for fqn in ancestors(module.fqn) if inventory.by_fqn[fqn].container]
        in_list = bool(module.fqn) and len(around) == 1 and next(ancestors(module.fqn)) == around[0]
        if in_list and base and not module.fqn.startswith(base) and owns_parameters(inventory, module.fqn):
            found.append(module.fqn)
    return tuple(found)
