"""Every single mutation of a shipped plan: one thing altered in its YAML, the rest as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from shardplan.patterns import parse_pattern
from shardplan.resources import shipped_plans
from shardplan.styles import ALIASES, STYLES

STYLE_WORDS: tuple[str | None, ...] = (*(name for name in STYLES if name not in ALIASES), None)
LAYOUTS = (
    "replicate", "stream", "partial", "shard(-1)", "replicate -> stream", "stream -> replicate", "partial -> stream",
    "partial -> replicate", "shard(-1) -> replicate", "replicate -> shard(-1)", "stream -> shard(-1)",
)  # fmt: skip

Document = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """A plan with one thing altered.

    Attributes:
        plan: the shipped one.
        kind: drop, style, options, misspell, move, layout, fsdp, wildcard or class.
        text: what was altered, for reports.
        source: the YAML.
        written: the pattern of the rule that the mutation wrote; "" where it wrote none.
    """

    plan: str
    kind: str
    text: str
    source: str
    written: str = ""


def document(plan: str) -> Document:
    read: Document = yaml.safe_load(shipped_plans()[plan].read_text())
    return read


def mutants(plan: str) -> Iterator[Mutant]:
    """Mutations that come to the same source are given once."""
    original = document(plan)
    seen = {_dumped(original)}
    for kind, text, mutated, written in _all(original):
        source = _dumped(mutated)
        if source not in seen:
            seen.add(source)
            yield Mutant(plan, kind, text, source, written)


def _dumped(content: Document) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=1000)


Mutation = tuple[str, str, Document, str]  # kind, text, document, pattern written


def _all(original: Document) -> Iterator[Mutation]:
    for key in original["rules"]:
        for alternative in _alternatives(key):
            yield from _of_rule(original, key, alternative)
    yield from _of_units(original, *NAMES.get(original["architectures"][0], _USUAL))


# What FSDP2 units are split into, and what becomes a unit beside them: of most models, and of those named otherwise.
_USUAL = (
    (".layers.*.self_attn", ".layers.*.mlp"),
    (".embed_tokens", "lm_head", ".norm", ".", ".layers", ".layers.*.input_layernorm"),
)
NAMES = {
    "GPT2LMHeadModel": ((".h.*.attn", ".h.*.mlp"), (".wte", "lm_head", ".ln_f", ".", ".h", ".h.*.ln_1")),
    "NemotronHForCausalLM": (
        (".layers.*.norm", ".layers.*.mixer"),
        (".embeddings", "lm_head", ".norm_f", ".", ".layers", ".layers.*.norm"),
    ),
}


def _alternatives(key: str) -> list[str]:
    """The rule as a whole, and each of its alternatives by itself."""
    parts = [alternative.text for alternative in parse_pattern(key).alternatives]
    optional = "?" if key.endswith("?") else ""
    return [key] if len(parts) == 1 else [key, *(part + optional for part in parts)]


def _of_rule(original: Document, key: str, part: str) -> Iterator[Mutation]:
    value = original["rules"][key]
    yield "drop", f"{part} dropped", _with(original, key, part, None, None), ""
    for style in STYLE_WORDS:
        changed = {**value, "style": style} if isinstance(value, dict) and style else style
        if changed != value:
            yield "style", f"{part}: {style}", _with(original, key, part, part, changed), part
    for edge in ("input", "output"):
        for layout in LAYOUTS:
            stated = value if isinstance(value, dict) else {"style": value} if value else {}
            yield (
                "layout",
                f"{part} {edge}: {layout}",
                _with(original, key, part, part, {**stated, edge: layout}),
                part,
            )
        if isinstance(value, dict) and edge in value:
            fewer = {name: entry for name, entry in value.items() if name != edge}
            if fewer:
                yield "layout", f"{part} without {edge}", _with(original, key, part, part, fewer), part
    for text, options in _other_options(value if isinstance(value, dict) else {}):
        yield "options", f"{part} {text}", _with(original, key, part, part, options or None), part
    for kind, pattern in _other_patterns(part):
        if pattern not in original["rules"]:
            yield kind, f"{part} as {pattern}", _with(original, key, part, pattern, value), pattern


def _other_options(value: Document) -> Iterator[tuple[str, Document]]:
    """Sections, local sizes and dims otherwise."""
    for option in ("sections", "local_sizes", "dim"):
        if option in value:
            yield f"without {option}", {name: entry for name, entry in value.items() if name != option}
    sections = value.get("sections", [])
    if sections:
        yield "first sections swapped", {**value, "sections": [sections[1], sections[0], *sections[2:]]}
        yield "last section dropped", {**value, "sections": sections[:-1]}
        joined = {"both": " + ".join(size for section in sections[:2] for size in section.values())}
        yield "first sections as one", {**value, "sections": [joined, *sections[2:]]}
    for number, name in enumerate(value.get("local_sizes", [])):
        rest = [*value["local_sizes"][:number], *value["local_sizes"][number + 1 :]]
        if rest:
            yield f"without local size {name}", {**value, "local_sizes": rest}
    if "dim" in value:
        for dim in {0, 1, 2, 3} - {value["dim"]}:
            yield f"dim {dim}", {**value, "dim": dim}


def _other_patterns(pattern: str) -> Iterator[tuple[str, str]]:
    optional = "?" if pattern.endswith("?") else ""
    body, _, cls = pattern.removesuffix("?").partition("@")
    if cls:
        yield from (("class", body + other + optional) for other in ("", "@Nothing", "@*"))
        optional = f"@{cls}{optional}"
    tokens = body.split(".")
    if "{" not in body:
        yield "misspell", body[:-1] + optional
        if len(tokens) > 2:
            yield "move", ".".join(tokens[:-1]) + optional
            yield "move", ".".join((*tokens[:-2], tokens[-1])) + optional
        yield "move", f"{body}.*{optional}"
    else:
        yield "misspell", body.replace("}", "x}") + optional
    if ".*." in body or body.endswith(".*"):
        yield "wildcard", body.replace(".*", ".0", 1) + optional
        yield "wildcard", body.replace(".*", ".**", 1) + optional
        yield "wildcard", body.replace(".*", ".[0-0]", 1) + optional
    yield "wildcard", "**." + tokens[-1] + optional if "{" not in body else "**" + body + optional
    if not cls:
        yield "class", body + "@Nothing" + optional
        yield "class", body + "@*" + optional


def _with(original: Document, key: str, part: str, pattern: str | None, value: Any) -> Document:
    """The document with ``part`` of rule ``key`` written as ``pattern: value``, or dropped where that is None."""
    mutated = copy.deepcopy(original)
    rules: Document = {}
    for name, entry in original["rules"].items():
        if name != key:
            rules[name] = entry
            continue
        if part != key:
            rules |= {rest: entry for rest in _alternatives(key)[1:] if rest != part}
        if pattern is not None:
            rules[pattern] = value
    mutated["rules"] = rules
    return mutated


def _of_units(original: Document, parts: tuple[str, ...], others: tuple[str, ...]) -> Iterator[Mutation]:
    units = original["fsdp"]["units"]

    def fsdp(text: str, units: Document, **others: Any) -> Mutation:
        mutated = copy.deepcopy(original)
        mutated["fsdp"] = {"units": units, **{k: v for k, v in original["fsdp"].items() if k != "units"}, **others}
        return "fsdp", f"fsdp {text}", mutated, ""

    for key in units:
        rest = {name: entry for name, entry in units.items() if name != key}
        yield fsdp(f"{key} dropped", rest)
        yield fsdp(f"{key} misspelt", {**rest, key.removesuffix("?") + "x": {}})
        yield fsdp(f"{key} split", {**rest, **{part: {} for part in parts}})
        yield fsdp(f"{key} for the first alone", {**rest, key.replace("*", "0"): {}})
        yield fsdp(f"{key} one level up", {**rest, key.removesuffix("?").rpartition(".")[0] or ".": {}})
        yield fsdp(f"{key} reshard false", {**units, key: {"reshard": False}})
        yield fsdp(f"{key} reshard 2", {**units, key: {"reshard": 2}})
    for added in others:
        yield fsdp(f"with {added}", {**units, added: {}})
    yield fsdp("root reshard true", units, root={"reshard": True})
    without = copy.deepcopy(original)
    del without["fsdp"]
    yield "fsdp", "fsdp dropped as a whole", without, ""
