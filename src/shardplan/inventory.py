"""What a model is made of, as frozen facts: the only thing about a model that the stages before `apply` see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import unwrap
from math import prod
from typing import TYPE_CHECKING, Any

from shardplan.attention import HeadInfo, head_info
from shardplan.class_source import interleaves, reads_children
from shardplan.configuration import dropout, slides, text_config, whole_numbers
from shardplan.experts import ExpertsInfo, experts_info
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
class ModuleInfo:
    """One module.

    Attributes:
        fqn: its name without the parts that wrappers add.
        path: where it is found in the model as it stands.
        outermost: where the outermost wrapper around it is found; ``path`` without wrappers.
        container: a list or dict of modules, whose own forward never runs.
        sizes: its whole numbers by attribute.
        reads_children: whether its methods read weights of modules below it by themselves.
        interleaves: whether queries, keys and values, or gate and up, take turns in one projection, and do not lie one
            behind the other.
        experts: how routed experts lie in it, where it holds some.
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
    experts: ExpertsInfo | None = None

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
        embedding, head: fqns of the input embedding and of the module that computes logits, where the model tells; the
            embedding also where there is one only.
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
        embedding=fqns.get(id(_call(model, "get_input_embeddings"))) or _only_embedding(model, modules),
        head=fqns.get(id(_call(model, "get_output_embeddings"))),
        attention=getattr(config, "_attn_implementation", None),
        sliding_window=slides(text_config(config)),
        own_forward=not unwrap(innermost.forward).__module__.startswith("transformers."),
        sizes=whole_numbers(text_config(config)),
        tp_plan=tuple((getattr(model, "tp_plan", None) or {}).items()),
        fsdp_plan=tuple((getattr(model, "fsdp_plan", None) or {}).items()),
        dropout=dropout(text_config(config)),
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
        sizes=whole_numbers(module),
        attention=head_info(module),
        reads_children=_reads_own_children(module),
        interleaves=_lies_head_by_head(module),
        experts=experts_info(module),
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
    return not holds_lists and not hasattr(module, "get_input_embeddings") and reads_children(module.__class__)


def _lies_head_by_head(module: Any) -> bool:
    return interleaves(module.__class__)


def _only_embedding(model: nn.Module, modules: tuple[ModuleInfo, ...]) -> str | None:
    """The one embedding of a model that is not transformers' and cannot be asked; None where there are more."""
    found = [module.fqn for module in modules if module.kind is Kind.EMBEDDING]
    return found[0] if len(found) == 1 and not hasattr(model, "get_input_embeddings") else None


def _call(model: nn.Module, accessor: str) -> nn.Module | None:
    method = getattr(model, accessor, None)
    if method is None:
        return None
    try:
        found: nn.Module | None = method()
    except (NotImplementedError, AttributeError):  # transformers' way to say that a model has none
        return None
    return found
