"""What of a compiled plan makes a difference where it is applied: plans that agree in it do the same."""

from __future__ import annotations

from dataclasses import replace

from shardplan.compiled import CompiledModule, CompiledPlan


def effect(compiled: CompiledPlan) -> str:
    """All that `shardplan.apply.apply` sees of a plan, but for the names of rules and of the plan itself.

    Equal for two models of one recipe, too, whose parameters have other identities.
    """
    ordinals: dict[int, int] = {}
    modules = tuple(_nameless(module, ordinals) for module in compiled.modules)
    return repr(replace(compiled, name="", modules=modules))


def _nameless(module: CompiledModule, ordinals: dict[int, int]) -> CompiledModule:
    parameters = tuple(
        replace(parameter, identity=ordinals.setdefault(parameter.identity, len(ordinals)))
        for parameter in module.parameters
    )
    return replace(module, style="", where=None, layer=None, parameters=parameters)
