"""A small model of the same architecture: same kinds of layers, same ratio of heads to tp, same tying and experts.

Sizes go down by name (`shardplan.verify.sizes`); the first layers are kept, as many as it takes to have one of each
kind. Whether the result is the same architecture is not believed but looked at: the module tree must have the same
names and classes, and a forward and a backward must run. Gentler attempts follow one that fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import nn

from shardplan.checks.names import general
from shardplan.diagnostics import Diagnostic, PlanError
from shardplan.resolved import ResolvedPlan
from shardplan.verify.sizes import Role, Scale, role_of, small
from shardplan.verify.treatments import layers_told_apart

HEAD_DIMS = (8, 16, 32)  # sections of rotary dims and partial rotary factors may need more than 8
NOT_SIZES = ("id2label", "label2id", "dtype")


@dataclass(frozen=True, slots=True)
class Change:
    """One size before and after; ``field`` is dotted where it lies in a part of the configuration."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field} {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True)
class Shrunk:
    """A model class and the small configuration for it; a picklable recipe for the model."""

    model_class: type[nn.Module]
    config: Any
    changes: tuple[Change, ...]

    def __call__(self) -> nn.Module:
        """The small model with its own initial weights, on torch's default device."""
        model: nn.Module = self.model_class(_copy(self.config))
        return model


def shrink(model: nn.Module, tp: int, small_tp: int, resolved: ResolvedPlan | None = None) -> Shrunk:
    """Find a small configuration for the class of ``model``.

    Args:
        model: a transformers model, usually on the meta device; its configuration is left as it is.
        tp: the tensor parallel degree that the plan is meant for.
        small_tp: the one that it will be run on.
        resolved: the plan for ``model``: one layer is kept of every kind that it makes of them.

    Raises:
        PlanError: SP903, no attempt gives a model of the same architecture that runs; with the reason of the last.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise _refused(model, "it has no transformers configuration to make smaller")
    total, reason = _layers_of(config), "nothing was tried"
    kept = max(_layers_to_keep(model), layers_told_apart(resolved, total) if resolved else 0)
    for head_dim in HEAD_DIMS:
        for layers in dict.fromkeys((kept, max(kept, 4), total)):
            fields = _small_fields(config.to_dict(), tp, small_tp, layers, head_dim)
            shrunk, reason = _attempt(model, config, fields)
            if shrunk is not None:
                return shrunk
    raise _refused(model, reason)


def _refused(model: nn.Module, reason: str) -> PlanError:
    name = type(model).__name__
    message = f"{name} cannot be made small: {reason}"
    hint = "name a function that builds a small one: --model module:function"
    return PlanError([Diagnostic("SP903", message, subject=name, expected="a transformers model", hint=hint)])


# ---------------------------------------------------------------- one attempt


def _attempt(model: nn.Module, config: Any, fields: Mapping[str, Any]) -> tuple[Shrunk | None, str]:
    """The small model's configuration, or why it is not one."""
    try:
        small_config = _rebuilt(config, fields)
        with torch.device("meta"):
            tree = _tree(type(model)(_copy(small_config)))
        wanted = _tree(model)
        if tree != wanted:
            odd = sorted(f"{name} ({cls})" for name, cls in tree ^ wanted)
            return None, f"the small one differs in {', '.join(odd[:4])}"
        shrunk = Shrunk(type(model), small_config, tuple(_changes(config.to_dict(), small_config.to_dict())))
        _runs(shrunk)
    except Exception as error:  # noqa: BLE001 - any model's code, on sizes that nobody tried: a failed attempt
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return shrunk, ""


def _rebuilt(config: Any, fields: Mapping[str, Any]) -> Any:
    rebuilt = type(config).from_dict(dict(fields))
    rebuilt._attn_implementation = config._attn_implementation
    return rebuilt


def _copy(config: Any) -> Any:
    """Models write into their configuration."""
    copy = type(config).from_dict(config.to_dict())
    copy._attn_implementation = config._attn_implementation
    return copy


def _runs(shrunk: Shrunk) -> None:
    torch.manual_seed(0)
    model = shrunk()
    ids = torch.randint(0, shrunk.config.get_text_config().vocab_size, (1, 5))
    output = model(input_ids=ids, use_cache=False)
    output.logits.float().sum().backward()


def _tree(model: nn.Module) -> set[tuple[str, str]]:
    return {(general(fqn), type(module).__name__) for fqn, module in model.named_modules()}


# ---------------------------------------------------------------- fields


def _small_fields(fields: Mapping[str, Any], tp: int, small_tp: int, layers: int, head_dim: int) -> dict[str, Any]:
    """The fields of a configuration, and of the configurations inside it, brought down."""
    scale = _scale(fields, tp, small_tp, layers, head_dim)
    total = _layers_in(fields)
    vocabulary = scale.vocabulary(fields["vocab_size"]) if type(fields.get("vocab_size")) is int else 256
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in NOT_SIZES:
            found[name] = None if name == "dtype" else value  # proofs run in fp32
        elif isinstance(value, dict) and "rope" in name:
            found[name] = _rope(value, scale)
        elif isinstance(value, dict) and name == "per_layer_config":
            found[name] = {
                layer: {field: _small_value(field, own, scale, vocabulary, total) for field, own in differing.items()}
                for layer, differing in value.items()
                if int(layer) < layers
            }
        elif isinstance(value, dict) and name.endswith("config"):
            found[name] = _small_fields(value, tp, small_tp, layers, head_dim)
        else:
            found[name] = _small_value(name, value, scale, vocabulary, total)
    return {**found, **dict(_products(fields, found))}


# Widths that a configuration states beside the factors that they are a product of.
PRODUCTS = {"mamba_d_ssm": ("mamba_n_heads", "mamba_d_head")}


def _products(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, factors in PRODUCTS.items():
        if before.get(name) and before[name] == prod(before.get(factor) or 0 for factor in factors):
            yield name, prod(after[factor] for factor in factors)


def _small_value(name: str, value: Any, scale: Scale, vocabulary: int, total: int) -> Any:
    role = role_of(name)
    if isinstance(value, list | tuple) and value and role not in (Role.TOKEN, Role.VOCABULARY):
        if len(value) == total:  # one entry for each layer
            value = list(value[: scale.layers])
        elif total and re.search(r"layer|idx", name) and all(type(entry) is int for entry in value):
            value = [entry for entry in value if entry < scale.layers]
    if role is None:
        return value
    if role is Role.LAYERS and isinstance(value, int) and 0 < value < total:
        return max(1, value * scale.layers // total)  # a part of the layers
    return small(role, value, scale, vocabulary)


def _rope(value: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """Lists of rotary dims: sections of the half head dim, and a factor for each."""
    found: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, dict):
            found[name] = _rope(entry, scale)
        elif name == "mrope_section":
            found[name] = [max(1, int(section / scale.head_dims)) for section in entry]
        elif isinstance(entry, list) and name.endswith("_factor"):
            found[name] = entry[: max(1, int(len(entry) / scale.head_dims))]
        else:
            found[name] = entry
    return found


def _scale(fields: Mapping[str, Any], tp: int, small_tp: int, layers: int, head_dim: int) -> Scale:
    heads = _first(fields, ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")) or 1
    width = _first(fields, ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim")) or 1
    whole_dim = _first(fields, ("head_dim", "qk_nope_head_dim", "attention_head_dim")) or max(1, width // heads)
    head_dims = max(1.0, whole_dim / head_dim)
    by_heads = heads / max(1, heads * small_tp // tp) if heads > 1 else tp / small_tp
    return Scale(tp, small_tp, layers, width=max(1.0, by_heads * head_dims), head_dims=head_dims)


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[name] for name in names if type(fields.get(name)) is int), None)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    for name, value in after.items():
        old = before.get(name)
        if name in NOT_SIZES:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            yield from _changes(old, value, f"{prefix}{name}.")
        elif role_of(name) not in (Role.TOKEN, Role.INITIAL) and value != old and name in before:
            yield Change(prefix + name, old, value)


def _shown(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list | tuple) and len(value) > 4 else str(value)


# ---------------------------------------------------------------- layers

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
           "num_blocks")  # fmt: skip


def _layers_in(fields: Mapping[str, Any]) -> int:
    """How many layers a configuration says; some say only of which kinds they are, one by one."""
    kinds = next((fields[name] for name in ("layer_types", "layers_block_type") if fields.get(name)), ())
    return _first(fields, _LAYERS) or len(kinds)


def _layers_of(config: Any) -> int:
    return _layers_in(config.get_text_config().to_dict())


def _layers_to_keep(model: nn.Module) -> int:
    """How many of the first layers hold one of every kind; at least two."""
    kept, total = 2, _layers_of(model.config)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            kinds = [_kind(layer) for layer in module]
            kept = max(kept, ceil(max(kinds.index(kind) for kind in set(kinds)) + 1))
    return min(kept, total) if total else kept


def _kind(layer: nn.Module) -> frozenset[tuple[str, str, frozenset[tuple[str, str]]]]:
    """What tells a layer from others: its modules' names and classes, and the switches that they were built with."""
    return frozenset(
        (fqn, type(module).__name__, frozenset(_switches(module))) for fqn, module in layer.named_modules()
    )


def _switches(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        numbered = re.search(r"idx|index|layer_id|number", name)
        if isinstance(value, bool | str | int) and not name.startswith("_") and not numbered:
            yield name, str(value)
