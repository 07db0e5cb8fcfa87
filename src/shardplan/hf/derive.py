"""transformers' own plan completed to one of ours: blocks around what is cut, the stream, the ends, what stays whole.

transformers names linears, and each of them converts for itself. Here the module of a decoder layer that they belong to
becomes a block, which converts once on its way in and once on its way out. What its plan leaves out is decided by where
it stands: inside a block its gradient is partial, on the stream it is a norm or a module that gathers for itself, and
elsewhere it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardplan.checks.names import general
from shardplan.experts import BIAS, GIVING, TAKING, ExpertsInfo
from shardplan.hf.infer import infer, is_mamba2
from shardplan.hf.structure import Structure, is_token_wise, language_model, owns_parameters, tower_layers
from shardplan.hf.styles import HF_STYLES, Meaning
from shardplan.inventory import Inventory, ModuleInfo, ParameterInfo, ancestors
from shardplan.layouts import REPLICATE, STREAM, Conversion, shard
from shardplan.sections import Section
from shardplan.styles import Kind

SCATTERED, GATHERED = Conversion(REPLICATE, STREAM), Conversion(STREAM, REPLICATE)


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a derived rule says of a name; ``source`` is the key of transformers' plan that says so, "" if none does."""

    style: str | None
    input: Conversion | None = None
    output: Conversion | None = None
    dim: int | None = None
    sections: tuple[Section, ...] = ()
    local_sizes: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Derived:
    """Treatments by name, units by name with ``reshard``, and keys of transformers' plan that match nothing."""

    treatments: dict[str, Treatment]
    units: dict[str, bool | None]
    dead: tuple[str, ...]
    unknown: dict[str, str]


def derive(inventory: Inventory, plan: Mapping[str, str], fsdp_plan: Mapping[str, str]) -> Derived:
    """Complete transformers' ``plan`` for a model.

    Args:
        inventory: the model.
        plan: general names (``model.layers.*.mlp``) to style names, as ``model.tp_plan`` has them.
        fsdp_plan: the same of ``model.fsdp_plan``.
    """
    names = {name: general(name) for name in (*inventory.by_fqn, *(p.fqn for p in inventory.parameters))}
    keys = set(names.values())
    known = {key: HF_STYLES[style].meaning for key, style in plan.items() if style in HF_STYLES and key in keys}
    base = language_model(inventory)
    meant = {name: known[key] for name, key in names.items() if key in known and name.startswith(base)}
    structure = Structure(inventory, {**infer(inventory, meant), **meant})
    derivation = _Derivation(structure, frozenset(meant))
    derivation.run()
    return Derived(
        treatments=derivation.treatments,
        units=_units(fsdp_plan, structure),
        dead=tuple(key for key in plan if key not in keys),
        unknown={key: style for key, style in plan.items() if style not in HF_STYLES},
    )


@dataclass
class _Derivation:
    """Decides part by part; what is decided first stays.

    Attributes:
        structure: where the model's parts stand.
        said: the names that transformers' own plan speaks of.
    """

    structure: Structure
    said: frozenset[str]
    treatments: dict[str, Treatment] = field(default_factory=dict)

    @property
    def inventory(self) -> Inventory:
        return self.structure.inventory

    @property
    def meant(self) -> Mapping[str, Meaning]:
        return self.structure.meant

    def run(self) -> None:
        self._ends()
        for child in self.structure.children_of_layers:
            self._child(child)
        self._stream()
        self._rest()

    def _say(self, name: str, treatment: Treatment) -> None:
        self.treatments.setdefault(name, treatment)

    def _ends(self) -> None:
        """The tables of words, cut over them, and the head, which hands its logits on as they are."""
        if not self.meant:
            return
        for table in self.structure.tables_of_words:
            self._say(table, Treatment("embedding_rowwise"))
        head = self.inventory.head
        if head is not None and _is_plain_linear(self.inventory.by_fqn[head]):
            self._say(head, Treatment("colwise", output=Conversion(shard(-1), shard(-1))))

    def _child(self, child: ModuleInfo) -> None:
        """A norm, attention, an MLP: one of the modules that a decoder layer runs."""
        meanings = self.structure.meanings(child.fqn)
        if is_mamba2(self.inventory, child):
            self._say(child.fqn, Treatment("mamba2"))
        elif Meaning.CUT_INPUT in meanings and meanings & {
            Meaning.CUT_OUTPUT,
            Meaning.PACKED_OUTPUT,
            Meaning.PACKED_LAST,
        }:
            self._block(child)
        elif owns_parameters(self.inventory, child.fqn):
            self._outside_blocks(child)

    def _block(self, block: ModuleInfo) -> None:
        self._say(block.fqn, Treatment("block", local_sizes=block.attention.hard_coded if block.attention else ()))
        for module in (block, *self.structure.below(block.fqn)):
            for parameter in module.parameters:
                self._parameter_in_block(module, parameter)
            if module.fqn in self.meant and module is not block:
                self._module_in_block(module)

    def _module_in_block(self, module: ModuleInfo) -> None:
        meaning, key = self.meant[module.fqn], self._key(module.fqn)
        if meaning is Meaning.CUT_OUTPUT and module.kind.is_linear:
            self._say(module.fqn, Treatment("colwise", sections=self._as_one(module), source=key))
        elif meaning is Meaning.CUT_INPUT and module.kind.is_linear:
            self._say(module.fqn, Treatment("rowwise", source=key))
        elif meaning is Meaning.PACKED_OUTPUT and module.kind.is_linear:
            self._say(module.fqn, Treatment("colwise", sections=_halves(module.features[0]), source=key))
        elif meaning is Meaning.IDENTITY_EXPERT:
            self._say(module.fqn, Treatment("counted_once", source=key))

    def _as_one(self, linear: ModuleInfo) -> tuple[Section, ...]:
        """A packed linear that transformers cuts plainly lies head by head: one section, cut as a whole."""
        siblings = [
            m for m in self.inventory.modules if next(ancestors(m.fqn), "") == next(ancestors(linear.fqn), None)
        ]
        producers = [m for m in siblings if self.meant.get(m.fqn) is Meaning.CUT_OUTPUT]
        consumers = [m for m in siblings if self.meant.get(m.fqn) is Meaning.CUT_INPUT and m.kind.is_linear]
        plain = self.inventory.by_fqn[next(ancestors(linear.fqn))].interleaves
        if plain or len(producers) != 1 or len(consumers) != 1 or consumers[0].features[1] == linear.features[0]:
            return ()
        return (Section("heads", str(linear.features[0])),)

    def _parameter_in_block(self, module: ModuleInfo, parameter: ParameterInfo) -> None:
        if module.experts is not None and any(p.fqn in self.meant for p in module.parameters):
            self._say(parameter.fqn, self._of_experts(module.experts, parameter))
            return
        meaning, shape = self.meant.get(parameter.fqn), parameter.shape
        dims: dict[Meaning, int] = {
            Meaning.CUT_OUTPUT: max(len(shape) - 2, 0),
            Meaning.CUT_INPUT: len(shape) - 1,
            Meaning.PACKED_OUTPUT: max(len(shape) - 2, 0),
            Meaning.PACKED_LAST: len(shape) - 1,
        }
        if meaning in dims and module.kind is Kind.OTHER:
            dim = dims[meaning]
            packed = meaning in (Meaning.PACKED_OUTPUT, Meaning.PACKED_LAST)
            sections = _halves(shape[dim]) if packed else ()
            self._say(parameter.fqn, Treatment("shard", dim=dim, sections=sections, source=self._key(parameter.fqn)))
        elif not self._is_cut(module):
            opens = self.treatments.get(module.fqn, _PARTIAL).style == "block"
            name = parameter.fqn if opens else module.fqn
            self._say(name, Treatment("replicated_with_grad_allreduce", source=self._key(name)))

    def _of_experts(self, experts: ExpertsInfo, parameter: ParameterInfo) -> Treatment:
        """Where their features lie the module says; transformers' plans may speak of the order in checkpoints."""
        key, projection = self._key(parameter.fqn), parameter.name.removesuffix(BIAS)
        if projection in GIVING:
            dim = experts.given if len(parameter.shape) == 3 else 1
            packed = experts.gated and experts.concatenated
            return Treatment("shard", dim=dim, sections=_halves(parameter.shape[dim]) if packed else (), source=key)
        if projection == TAKING and len(parameter.shape) == 3:
            return Treatment("shard", dim=experts.taken, source=key)
        if projection == TAKING:
            return Treatment("added_once", source=key)
        return Treatment("replicated_with_grad_allreduce", source=key)

    def _is_cut(self, module: ModuleInfo) -> bool:
        cut = {Meaning.CUT_OUTPUT, Meaning.CUT_INPUT, Meaning.PACKED_OUTPUT, Meaning.IDENTITY_EXPERT}
        return self.meant.get(module.fqn) in cut

    def _outside_blocks(self, child: ModuleInfo) -> None:
        """Norms run on the cut stream; whatever else may mix tokens, and gathers them for itself."""
        below = {name: meant for name, meant in self.meant.items() if f"{name}.".startswith(f"{child.fqn}.")}
        gathers = {name: _CONVERT_ALONE[meant] for name, meant in below.items() if meant in _CONVERT_ALONE}
        for name, style in gathers.items():
            self._say(name, Treatment(style, source=general(name)))
        if is_token_wise(self.inventory, child):
            self._say(child.fqn, Treatment("sequence_parallel"))
        elif child.fqn not in gathers:
            takes, gives = self.structure.meets_stream(child)
            self._say(
                child.fqn,
                Treatment("replicate", input=GATHERED if takes else None, output=SCATTERED if gives else None),
            )

    def _stream(self) -> None:
        """Cut before the first layer, gathered by the norm behind the last: where there is one list and one norm."""
        norm = self.structure.final_norm
        if len(self.structure.lists) == 1 and norm is not None:
            first = self.structure.layers[0]
            self._say(first, Treatment(None, input=SCATTERED))
            self._say(norm, Treatment("sequence_parallel", output=GATHERED))

    def _rest(self) -> None:
        """What stands beside all that: position tables, projections, towers, parameters of the layers themselves."""
        for module in self.inventory.modules:
            if "Rotary" in module.class_name and not module.parameters and module.fqn in self.structure.beside_layers:
                self._say(module.fqn, Treatment("rotary"))
            if not module.parameters or self._decided(module.fqn):
                continue
            inside = any(layer in (module.fqn, *ancestors(module.fqn)) for layer in self.structure.layers)
            on_stream = inside or module.fqn in self.structure.ends_of_stream
            style = "sequence_parallel" if on_stream else "replicate"
            if module.fqn in self.treatments or module.fqn in self.structure.layers:
                for parameter in module.parameters:
                    self._say(parameter.fqn, Treatment(style))
            elif not all(parameter.fqn in self.treatments for parameter in module.parameters):
                self._say(module.fqn, Treatment(style))

    def _decided(self, fqn: str) -> bool:
        decides = {name for name, treatment in self.treatments.items() if treatment.style not in _EDGES_ALONE}
        reaches = {name for name in decides if self.treatments[name].style in _REACHING_DOWN}
        return fqn in decides or any(above in reaches for above in ancestors(fqn))

    def _key(self, fqn: str) -> str:
        return general(fqn) if fqn in self.said else ""


_PARTIAL = Treatment("replicated_with_grad_allreduce")
_CONVERT_ALONE = {Meaning.GATHERED_OUTPUT: "colwise_gather_output", Meaning.SCATTERED_INPUT: "rowwise_split_input"}
_EDGES_ALONE = (None, "block")
_REACHING_DOWN = ("replicate", "sequence_parallel", "replicated_with_grad_allreduce", "mamba2")


def _is_plain_linear(module: ModuleInfo) -> bool:
    return module.kind is Kind.LINEAR and {parameter.name for parameter in module.parameters} <= {"weight", "bias"}


def _halves(length: int) -> tuple[Section, ...]:
    return Section("gate", str(length // 2)), Section("up", str(length // 2))


def _units(fsdp_plan: Mapping[str, str], structure: Structure) -> dict[str, bool | None]:
    """The layers of the language model and of towers; where transformers keeps them gathered so do we."""
    known = {key: HF_STYLES[style].meaning for key, style in fsdp_plan.items() if style in HF_STYLES}
    kept = {key for key, meaning in known.items() if meaning is Meaning.UNITS_KEPT}
    units = (*structure.layers, *tower_layers(structure.inventory)) if structure.layers else ()
    return {fqn: False if general(fqn) in kept else None for fqn in units}
