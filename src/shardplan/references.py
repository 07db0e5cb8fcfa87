"""The models that plans are checked on: shipped configurations, a config.json of one's own, or a class of one's own.

Nothing here reads weights or the network: a model is built on the meta device from its configuration alone.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardplan.checks.names import with_article
from shardplan.diagnostics import Diagnostic, PlanError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

_FOLDER = Path(__file__).parent / "reference_models"
# What transformers' models raise on sizes that do not go together: no heads, an odd head dim, a negative width.
_UNBUILDABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_JSON_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
# transformers 5.24: what it saves for floats that JSON has no number for, `{"__float__": "Infinity"}`.
_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_FORMS = "a reference model, a config.json, a folder with one, or module:Class"


def reference_models() -> dict[str, Path]:
    """The shipped configurations by name, such as ``llama-3.1-8b``; each file names its source under ``_source``."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.json"))}


def load_config(spec: str | Path) -> PreTrainedConfig:
    """Read the configuration that ``spec`` names: a reference model, a ``config.json`` or a folder with one.

    Raises:
        PlanError: SP901, nothing has that name, or it is no configuration that this transformers knows.
    """
    path = _config_file(str(spec))
    if path is None:
        raise _unknown(str(spec))
    return _read_config(path)


def build_meta_model(spec: str) -> nn.Module:
    """Build the model that ``spec`` names on the meta device, in torch's default dtype.

    Args:
        spec: a reference model, a ``config.json``, a folder with one, or ``module:Class``, where Class is an
            ``nn.Module`` class or a function; it is called without arguments.

    Raises:
        PlanError: SP901, the model cannot be found or built. What ``Class`` itself raises is passed on.
    """
    return build_model(spec, "meta")


def build_model(spec: str, device: str) -> nn.Module:
    """The same on another device, with weights of its own; see `build_meta_model`."""
    import torch

    path = _config_file(spec)
    if path is not None:
        build = _from_config(path)
    elif ":" in spec:
        build = _from_module(spec)
    else:
        raise _unknown(spec)
    with torch.device(device):
        model = build()
    if not isinstance(model, torch.nn.Module):
        raise _refused(spec, f"'{spec}' makes {with_article(type(model).__name__)}", expected="an nn.Module")
    return model


def _config_file(spec: str) -> Path | None:
    """The file that ``spec`` means; None when it names no shipped model and no file or folder."""
    path = reference_models().get(spec, Path(spec))
    if not path.is_dir():
        return path if path.is_file() else None
    if not (path / "config.json").is_file():
        raise _refused(spec, f"the folder '{spec}' holds no config.json", expected=_FORMS)
    return path / "config.json"


def _read_config(path: Path) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(str(path), f"'{path}' cannot be read as JSON: {error}") from error
    expected = "the config.json of a transformers model, an object with a model_type"
    if not isinstance(values, dict):
        raise _refused(str(path), f"'{path}' holds {with_article(_JSON_NAMES[type(values)])}", expected=expected)
    if "model_type" not in values:
        raise _refused(str(path), f"'{path}' has no model_type", expected=expected)
    if "auto_map" in values:
        raise _refused(
            str(path),
            f"'{path}' describes a model whose code comes with its weights (auto_map)",
            hint="code from a checkpoint is never run: name the class as module:Class",
        )
    _require_known_type(path, values["model_type"])
    try:
        return AutoConfig.for_model(**{key: _decoded(value) for key, value in values.items() if key != "_source"})
    # transformers 5.24: StrictDataclassError for a value of the wrong type; the others where it computes with sizes,
    # such as those of a model without heads.
    except (*_UNBUILDABLE, StrictDataclassError) as error:
        raise _refused(str(path), f"transformers refuses '{path}': {type(error).__name__}: {error}") from error


def _decoded(value: Any) -> Any:
    """A value of a config.json with its tagged floats read, however deep, as `PreTrainedConfig.from_json_file` does."""
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_FLOAT_TAG)
    if len(value) == 1 and isinstance(tag, str):
        return _TAGGED_FLOATS.get(tag, value)
    return {key: _decoded(entry) for key, entry in value.items()}


def _require_known_type(path: Path, model_type: object) -> None:
    """Refuse a type that transformers does not know; its own message lists all that it does."""
    from transformers import CONFIG_MAPPING, __version__

    known = list(CONFIG_MAPPING)
    if model_type not in known:
        near = difflib.get_close_matches(str(model_type), known, n=1)
        hint = f"did you mean '{near[0]}'? Otherwise " if near else ""
        raise _refused(
            str(path),
            f"transformers {__version__} knows no model_type '{model_type}', which '{path}' names",
            hint=f"{hint}install a transformers that has it, or name the class as module:Class",
        )


def _from_config(path: Path) -> Callable[[], Any]:
    """The class that the configuration names, else transformers' causal language model for its type."""
    import transformers

    config = _read_config(path)
    if not config.architectures:
        return lambda: _built(path, lambda: transformers.AutoModelForCausalLM.from_config(config))
    name = config.architectures[0]
    if not hasattr(transformers, name):
        raise _refused(
            str(path),
            f"transformers {transformers.__version__} has no class {name}, which '{path}' names in architectures",
            hint="install a transformers that has it, or name the class as module:Class",
        )
    model_class = getattr(transformers, name)
    return lambda: _built(path, lambda: model_class(config))


def _built(path: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except _UNBUILDABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise _refused(
            str(path), f"no model can be built from '{path}': {reason}", hint="correct its sizes, or the function"
        ) from error


def _from_module(spec: str) -> Callable[[], Any]:
    module_name, _, attribute = spec.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    # ValueError: an empty or relative module name.
    except (ImportError, ValueError) as error:
        raise _refused(spec, f"cannot import '{module_name}': {error}", expected=_FORMS) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=1)
            hint = f"did you mean '{near[0]}'?" if near else ""
            raise _refused(spec, f"'{module_name}' has no '{attribute}'", hint=hint)
        target = getattr(target, part)
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        hint = "write a function without arguments that returns the model"
        raise _refused(spec, f"'{spec}' cannot be called without arguments: {error}", hint=hint) from error
    build: Callable[[], Any] = target
    return lambda: _built(Path(spec), build)


def _unknown(spec: str) -> PlanError:
    names = list(reference_models())
    near = difflib.get_close_matches(spec.lower().rpartition("/")[2], names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the reference models are {', '.join(names)}"
    return _refused(spec, f"no model '{spec}'", expected=_FORMS, hint=hint)


def _refused(spec: str, message: str, *, expected: str = "", hint: str = "") -> PlanError:
    return PlanError([Diagnostic("SP901", message, subject=spec, expected=expected, hint=hint)])
