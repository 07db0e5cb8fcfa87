"""What the configs of transformers' models say: of the language model, of one layer, and by other names."""

from __future__ import annotations

from typing import Any


def text_config(config: Any) -> Any:
    """The config of the language model inside a multimodal one."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def config_of(module: Any) -> Any:
    """What a module was configured with: in a model whose layers differ, its own layer's part of the config."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    return config.per_layer_config[layer] if _per_layer(config) and isinstance(layer, int) else config


def field_of(config: Any, name: str) -> Any:
    """A field; None where there is none. Where layers differ in it, what the config says beside them."""
    # transformers refuses to read such a field from the config of the whole model.
    return vars(config).get(name) if name in _per_layer(config) else getattr(config, name, None)


def slides(config: Any) -> bool:
    """Whether any layer's attention has a sliding window."""
    layers = config.per_layer_config if _per_layer(config) else (config,)
    return any(field_of(layer, "sliding_window") for layer in layers)


def whole_numbers(of: object) -> tuple[tuple[str, int], ...]:
    """By attribute; a config's also by the names that transformers gives them in all configs.

    Numbers that layers have each for themselves are left out.
    """
    named = getattr(of, "__dict__", {}).items()
    own = {name: value for name, value in named if type(value) is int and name not in _per_layer(of)}
    aliases: dict[str, str] = getattr(of, "attribute_map", {})
    return tuple({**own, **{alias: own[name] for alias, name in aliases.items() if name in own}}.items())


def _per_layer(config: Any) -> set[str]:
    """The fields that layers have each for themselves, in transformers' heterogeneous configs."""
    return getattr(config, "per_layer_attributes", None) or set()


_OTHER_HEADS = ("classifier_", "summary_")


def dropout(config: Any) -> tuple[tuple[str, float], ...]:
    """transformers' configs name probabilities ``attention_dropout``, ``resid_pdrop`` and the like.

    Those of heads for other tasks stand in the same config.
    """
    named = vars(config).items() if config is not None else ()
    of_model = ((name, value) for name, value in named if "drop" in name and not name.startswith(_OTHER_HEADS))
    return tuple((name, value) for name, value in of_model if isinstance(value, float) and value > 0)
