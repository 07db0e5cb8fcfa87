"""What a model is made of, as frozen facts: the only thing about a model that the stages before `apply` see."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import getsource, isfunction, unwrap
from math import prod
from typing import TYPE_CHECKING, Any

from shardplan.styles import Kind

if TYPE_CHECKING:
    from torch import nn


# What `torch.compile` and checkpoint wrappers put into the names of what they wrap.
WRAPPER_TOKENS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter as one module owns it. ``identity`` is equal for parameters that are tied."""

    fqn: str
    name: str
    shape: tuple[int, ...]
    nbytes: int
    identity: int
    trainable: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """How an attention module divides its width: ``heads`` query and ``kv_heads`` key-value heads of ``head_dim``.

    ``hard_coded`` names attributes that hold a number of heads, or of all their features, and that its methods use: on
    a rank with fewer heads they are wrong.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hard_coded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One module.

    Attributes:
        fqn: its name without the parts that wrappers add.
        path: where it is found in the model as it stands.
        outermost: where the outermost wrapper around it is found; ``path`` without wrappers.
        container: a list or dict of modules, whose own forward never runs.
        sizes: its whole numbers by attribute.
        reads_children: whether its methods read weights of modules below it by themselves.
        interleaves: whether queries, keys and values lie in one projection head by head, and not one behind the other.
    """

    fqn: str
    path: str
    outermost: str
    class_name: str
    kind: Kind
    parameters: tuple[ParameterInfo, ...]
    container: bool
    sizes: tuple[tuple[str, int], ...]
    attention: HeadInfo | None = None
    reads_children: bool = False
    interleaves: bool = False

    @property
    def features(self) -> tuple[int, int]:
        """Output and input features of a linear's weight."""
        shape = next(parameter.shape for parameter in self.parameters if parameter.name == "weight")
        return (shape[1], shape[0]) if self.kind is Kind.CONV1D else (shape[0], shape[1])


@dataclass(frozen=True)
class Inventory:
    """A model's modules in definition order, the names its class goes by, and the ends of a language model.

    Attributes:
        architectures: class names from the model's class upwards.
        modules: every module once; the model itself has the fqn "".
        embedding, head: fqns of the input embedding and of the module that computes logits, where the model tells.
        attention: the attention implementation that the model is configured for.
        own_forward: whether the model's forward is a user's, not transformers'; what its head reads is then unknown.
        sizes: the whole numbers in its config, by field.
        tp_plan, fsdp_plan: transformers' own plans for it, by general name.
        dropout: the probabilities above zero in its config, by name.
        sliding_window: whether its config names a sliding window, which needs a mask.
    """

    architectures: tuple[str, ...]
    modules: tuple[ModuleInfo, ...]
    embedding: str | None
    head: str | None
    attention: str | None
    sliding_window: bool
    own_forward: bool
    sizes: tuple[tuple[str, int], ...]
    tp_plan: tuple[tuple[str, str], ...]
    fsdp_plan: tuple[tuple[str, str], ...]
    dropout: tuple[tuple[str, float], ...]

    def size(self, name: str, fqn: str) -> int | None:
        """The number that ``name`` is at a module: its own, the nearest one around it that has it, or the config's."""
        around = (dict(self.by_fqn[above].sizes) for above in (fqn, *ancestors(fqn)))
        return next((sizes[name] for sizes in (*around, dict(self.sizes)) if name in sizes), None)

    @cached_property
    def by_fqn(self) -> dict[str, ModuleInfo]:
        return {module.fqn: module for module in self.modules}

    @cached_property
    def children(self) -> dict[str, tuple[ModuleInfo, ...]]:
        """The modules directly below each module that has some."""
        found: dict[str, list[ModuleInfo]] = {}
        for module in self.modules:
            if module.fqn:
                found.setdefault(next(ancestors(module.fqn)), []).append(module)
        return {fqn: tuple(modules) for fqn, modules in found.items()}

    @cached_property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """Every parameter under every name that it has; tied ones more than once."""
        return tuple(parameter for module in self.modules for parameter in module.parameters)

    @cached_property
    def ties(self) -> tuple[tuple[ParameterInfo, ...], ...]:
        """Groups of two or more names for one parameter."""
        groups: dict[int, list[ParameterInfo]] = {}
        for parameter in self.parameters:
            groups.setdefault(parameter.identity, []).append(parameter)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def take_inventory(model: nn.Module) -> Inventory:
    """Read the facts off a real or meta-device model; nothing is changed and no weight is looked at."""
    from torch import nn

    found = _through_wrappers(model)
    modules = tuple(_module_info(fqn, outermost, path, module, nn) for fqn, (outermost, path, module) in found.items())
    fqns = {id(module): fqn for fqn, (_, _, module) in found.items()}
    innermost = type(found[""][2])
    config = getattr(model, "config", None)
    return Inventory(
        architectures=tuple(cls.__name__ for cls in innermost.__mro__ if cls not in (nn.Module, object)),
        modules=modules,
        embedding=fqns.get(id(_call(model, "get_input_embeddings"))),
        head=fqns.get(id(_call(model, "get_output_embeddings"))),
        attention=getattr(config, "_attn_implementation", None),
        sliding_window=bool(_field(_text_config(config), "sliding_window")),
        own_forward=not unwrap(innermost.forward).__module__.startswith("transformers."),
        sizes=_whole_numbers(_text_config(config)),
        tp_plan=tuple((getattr(model, "tp_plan", None) or {}).items()),
        fsdp_plan=tuple((getattr(model, "fsdp_plan", None) or {}).items()),
        dropout=_dropout(_text_config(config)),
    )


def _through_wrappers(model: nn.Module) -> dict[str, tuple[str, str, nn.Module]]:
    """fqn -> path of the outermost wrapper, path of the module itself, the module.

    PEFT puts a model at ``base_model.model`` and a linear at ``base_layer``, beside its adapters.
    """
    found: dict[str, tuple[str, str, nn.Module]] = {}
    adapted = {path for path, module in model.named_modules() if type(module).__module__.startswith("peft.")}
    for path, module in model.named_modules():
        fqn = ".".join(_own_tokens(path, adapted))
        outermost = found[fqn][0] if fqn in found else path
        found[fqn] = (outermost, path, module)
    return found


def _own_tokens(path: str, adapted: set[str]) -> Iterator[str]:
    """The parts of a path that no wrapper has added; ``adapted`` are the paths of PEFT's modules."""
    tokens = path.split(".") if path else []
    whole_model = "" in adapted and tokens[:1] == ["base_model"]
    for number, token in enumerate(tokens):
        of_peft = (whole_model and number < 2) or (token == "base_layer" and ".".join(tokens[:number]) in adapted)
        if token not in WRAPPER_TOKENS and not of_peft:
            yield token


def _text_config(config: Any) -> Any:
    """The config of the language model inside a multimodal one."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _whole_numbers(of: object) -> tuple[tuple[str, int], ...]:
    """By attribute; a config's also by the names that transformers gives them in all configs."""
    own = {name: value for name, value in getattr(of, "__dict__", {}).items() if type(value) is int}
    aliases: dict[str, str] = getattr(of, "attribute_map", {})
    return tuple({**own, **{alias: own[name] for alias, name in aliases.items() if name in own}}.items())


def _field(config: Any, name: str) -> Any:
    """A field of a config; None where it has none, or has another one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - transformers' heterogeneous configs raise their own kind where layers differ
        return None


_OTHER_HEADS = ("classifier_", "summary_")


def _dropout(config: Any) -> tuple[tuple[str, float], ...]:
    """transformers' configs name probabilities ``attention_dropout``, ``resid_pdrop`` and the like.

    Those of heads for other tasks stand in the same config.
    """
    named = vars(config).items() if config is not None else ()
    of_model = ((name, value) for name, value in named if "drop" in name and not name.startswith(_OTHER_HEADS))
    return tuple((name, value) for name, value in of_model if isinstance(value, float) and value > 0)


def ancestors(fqn: str) -> Iterator[str]:
    """The modules around ``fqn``, nearest first; the model itself, "", comes last."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def _module_info(fqn: str, outermost: str, path: str, module: nn.Module, nn: Any) -> ModuleInfo:
    return ModuleInfo(
        fqn=fqn,
        path=path,
        outermost=outermost,
        class_name=type(module).__name__,
        kind=_kind(module, nn),
        parameters=tuple(
            ParameterInfo(
                fqn=f"{fqn}.{name}" if fqn else name,
                name=name,
                shape=tuple(parameter.shape),
                nbytes=parameter.numel() * parameter.element_size(),
                identity=id(parameter),
                trainable=parameter.requires_grad,
            )
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ),
        container=isinstance(module, nn.ModuleList | nn.ModuleDict),
        sizes=_whole_numbers(module),
        attention=_head_info(module),
        reads_children=_reads_own_children(module),
        interleaves=_reads_heads_of_three(module),
    )


def _kind(module: nn.Module, nn: Any) -> Kind:
    if isinstance(module, nn.Linear):
        return Kind.LINEAR
    if isinstance(module, nn.Embedding):
        return Kind.EMBEDDING
    is_conv1d = any(cls.__name__ == "Conv1D" and cls.__module__ == _CONV1D for cls in type(module).__mro__)
    return Kind.CONV1D if is_conv1d else Kind.OTHER


_CONV1D = "transformers.pytorch_utils"  # by name: nothing here imports transformers


def _reads_own_children(module: Any) -> bool:
    """Not of a model or a decoder, which run long, and whose children FSDP2 looks at meanwhile."""
    holds_lists = any(hasattr(child, "__len__") for child in module.children())
    return not holds_lists and not hasattr(module, "get_input_embeddings") and _reads_children(module.__class__)


def _reads_heads_of_three(module: Any) -> bool:
    return _interleaves(module.__class__)


def _head_info(module: Any) -> HeadInfo | None:
    """transformers' attention modules carry their config and ``head_dim``; a module without either has no heads.

    So do Mamba-2 mixers, whose decay ``A_log`` tells them apart: their heads are others.
    """
    config, head_dim = getattr(module, "config", None), getattr(module, "head_dim", None)
    heads = _field(config, "num_attention_heads")
    if not isinstance(head_dim, int) or not isinstance(heads, int) or hasattr(module, "A_log"):
        return None
    kv_heads = _field(config, "num_key_value_heads") or heads
    numbers = {f"{prefix}{n}": v for prefix, of in (("", module), ("config.", config)) for n, v in _whole_numbers(of)}
    counts = {name for name, value in numbers.items() if value in {heads, kv_heads} - {1}}
    named = {name for name in counts if "head" in name and "dim" not in name and "group" not in name}
    widths = {heads * head_dim, kv_heads * head_dim}
    split = {name for name in _splits_by(module.__class__) if numbers.get(name) in widths}
    hard_coded = (named & _used_by_methods(module.__class__)) | split
    return HeadInfo(heads, kv_heads, head_dim, tuple(sorted(hard_coded)))


@cache
def _used_by_methods(cls: type) -> frozenset[str]:
    """Attributes of ``self`` that a class's methods use, ``config.`` before those of its config."""
    return frozenset(found for source in _sources(cls) for found in re.findall(r"\bself\.((?:config\.)?\w+)", source))


@cache
def _splits_by(cls: type) -> frozenset[str]:
    """Attributes of ``self`` by which a class's methods split an activation."""
    return frozenset(name for source in _sources(cls) for name in re.findall(r"\.split\(\s*self\.(\w+)", source))


@cache
def _interleaves(cls: type) -> bool:
    """Whether a class's methods view a projection as heads of three: ``3 * head_size``, ``num_heads, 3, head_dim``."""
    form = re.compile(r"3 \* self\.head_(?:size|dim)|num_heads, 3,")
    return any(form.search(source) for source in _sources(cls))


@cache
def _reads_children(cls: type) -> bool:
    """Whether a class's methods use ``self.child.weight`` or a child's bias."""
    return any(re.search(r"\bself\.\w+\.(weight|bias)\b", source) for source in _sources(cls))


@cache
def _sources(cls: type) -> tuple[str, ...]:
    """Of a class's methods, ``__init__`` aside; as far as they are there: a class typed at a prompt has none."""
    found = []
    for owner in cls.__mro__:
        if owner.__module__.startswith("torch.") or owner is object:
            continue
        for name, method in vars(owner).items():
            if isfunction(method) and name != "__init__":
                with suppress(OSError):
                    found.append(getsource(unwrap(method)))
    return tuple(found)


def _call(model: nn.Module, accessor: str) -> nn.Module | None:
    method = getattr(model, accessor, None)
    if method is None:
        return None
    try:
        found: nn.Module | None = method()
    except (NotImplementedError, AttributeError):  # transformers' way to say that a model has none
        return None
    return found
