"""Rules over modules: which rule decides about what, and what is left undecided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardplan.inventory import take_inventory
from shardplan.load import load_plan
from shardplan.merge import merge
from shardplan.resolve import resolve
from shardplan.resolved import ResolvedPlan


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.norm = nn.LayerNorm(2)


class Other(Mixer):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(), Other(), Mixer()])
        self.head = nn.Linear(2, 2)


def resolved(folder: Path, *layers: str, root: str = "") -> ResolvedPlan:
    """Layers of rules, lowest first."""
    plans = []
    for number, rules in enumerate(layers):
        path = folder / f"layer{number}.yaml"
        path.write_text("format: 1\n" + (f"root: {root}\n" if root else "") + "rules:\n" + rules)
        plans.append(load_plan(path))
    with torch.device("meta"):
        return resolve(merge(plans), take_inventory(Model()))


def style(plan: ResolvedPlan, fqn: str) -> str | None:
    found = plan.by_fqn[fqn].style
    return found.name if found else None


def claims(plan: ResolvedPlan, fqn: str) -> dict[str, str | None]:
    """Style that decides about each parameter of a module."""
    return {p.info.name: p.style.name if p.style else None for p in plan.by_fqn[fqn].parameters}


# ---------------------------------------------------------------- precedence


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        ("layers.0.a", "layers.[0-1].a"),
        ("layers.[0-1].a", "layers.*.a"),
        ("layers.*.a", "layers.*.*"),
        ("layers.*.a", "**.a"),
        ("layers.*.*", "**"),
        ("layers.*.a@Linear", "layers.*.a"),
        ("layers.0.a", "layers.*.a@Linear"),
        ("layers.*.a*", "layers.*.*"),
        ("layers.*.a", "layers.*.a*"),
    ],
)
def test_the_more_specific_pattern_decides_wherever_it_is_written(tmp_path: Path, stronger: str, weaker: str) -> None:
    rules = [f'  "{stronger}": rowwise\n', f'  "{weaker}": colwise\n']
    for order in (rules, rules[::-1]):
        plan = resolved(tmp_path, "".join(order))
        assert style(plan, "layers.0.a") == "rowwise"
        assert plan.ties == ()


def test_a_higher_layer_decides_however_vague(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  layers.0.a: colwise\n  layers.1.a: colwise\n", '  "layers.*.*": rowwise\n')
    assert [style(plan, f"layers.{i}.a") for i in range(3)] == ["rowwise"] * 3
    speakers = plan.by_fqn["layers.0.a"].speakers
    assert [(str(c.rule.pattern), c.rule.layer.rank) for c in speakers] == [("layers.*.*", 1), ("layers.0.a", 0)]


def test_of_three_layers_the_highest_that_speaks(tmp_path: Path) -> None:
    layers = ("  layers.*.{a,b}: colwise\n", "  layers.*.a: rowwise\n", "  layers.2.a: null\n")
    plan = resolved(tmp_path, *layers)
    assert [style(plan, f"layers.{i}.a") for i in range(3)] == ["rowwise", "rowwise", "null"]
    assert style(plan, "layers.0.b") == "colwise"


def test_equal_rank_and_different_words_are_a_tie(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  layers.*.a: colwise\n  layers.*.{a,b}: rowwise\n")
    (tie,) = plan.ties  # once, not for each layer
    assert (tie.fqn, str(tie.first.pattern), str(tie.second.pattern)) == (
        "layers.0.a", "layers.*.a", "layers.*.{a,b}",
    )  # fmt: skip


def test_equal_rank_and_equal_words_are_none(tmp_path: Path) -> None:
    assert resolved(tmp_path, "  layers.*.a: colwise\n  layers.*.{a,b}: colwise\n").ties == ()


def test_edges_are_part_of_what_a_rule_says(tmp_path: Path) -> None:
    rules = "  layers.*.a: colwise\n  layers.*.{a,b}: {style: colwise, input: stream -> replicate}\n"
    assert len(resolved(tmp_path, rules).ties) == 1


def test_layers_do_not_tie(tmp_path: Path) -> None:
    assert resolved(tmp_path, "  layers.*.a: colwise\n", "  layers.*.{a,b}: rowwise\n").ties == ()


# ---------------------------------------------------------------- claims on parameters


def test_a_style_claims_the_parameters_of_what_it_matches(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  head: colwise\n")
    assert claims(plan, "head") == {"weight": "colwise", "bias": "colwise"}
    assert claims(plan, "layers.0.a") == {"weight": None}


def test_a_block_claims_nothing_and_is_around_its_children(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  layers.*@Mixer: block\n  layers.*.a: colwise\n")
    assert claims(plan, "layers.0.b") == {"weight": None}
    assert claims(plan, "layers.0.a") == {"weight": "colwise"}
    assert {m.fqn: m.block for m in plan.modules if m.fqn.endswith(".a")} == {
        "layers.0.a": "layers.0", "layers.1.a": None, "layers.2.a": "layers.2",
    }  # fmt: skip
    assert [module.fqn for module in plan.children("layers.0")] == ["layers.0.a", "layers.0.b", "layers.0.norm"]
    assert plan.by_fqn["layers.0"].block is None


def test_replication_reaches_down_until_a_rule_speaks(tmp_path: Path) -> None:
    plan = resolved(tmp_path, '  "layers.*": null\n  layers.*.a: colwise\n')
    assert claims(plan, "layers.0.b") == {"weight": "null"}
    assert claims(plan, "layers.0.norm") == {"weight": "null", "bias": "null"}
    assert claims(plan, "layers.0.a") == {"weight": "colwise"}
    assert plan.by_fqn["layers.0.b"].rule is None, "a claim from above gives no edges"


def test_a_claim_from_above_is_as_specific_as_its_tokens(tmp_path: Path) -> None:
    """As if it ended in ``.**``: one layer, replicated whole, is more specific than a linear of every layer."""
    plan = resolved(tmp_path, "  layers.0: null\n  layers.*.a: colwise\n")
    assert (claims(plan, "layers.0.a"), claims(plan, "layers.1.a")) == ({"weight": "null"}, {"weight": "colwise"})


def test_a_rule_that_matches_wins_over_an_equal_claim_from_above(tmp_path: Path) -> None:
    plan = resolved(tmp_path, '  layers: null\n  "layers.**": sequence_parallel\n')
    assert claims(plan, "layers.0.norm") == {"weight": "sequence_parallel", "bias": "sequence_parallel"}
    assert plan.ties == ()


def test_a_written_null_of_a_higher_layer_is_not_filled_again(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  layers.*.a: colwise\n", "  layers.0: null\n")
    assert (style(plan, "layers.0.a"), claims(plan, "layers.0.a")) == (None, {"weight": "null"})
    assert style(plan, "layers.1.a") == "colwise"


def test_a_block_inside_a_replicated_part_stays_one(tmp_path: Path) -> None:
    plan = resolved(tmp_path, '  "layers.*": block\n  layers: null\n')
    assert (style(plan, "layers.0"), plan.by_fqn["layers.0.a"].block) == ("block", "layers.0")
    assert claims(plan, "layers.0.a") == {"weight": "null"}


def test_a_rule_may_speak_of_one_parameter(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  head: colwise\n  head.bias: null\n")
    assert claims(plan, "head") == {"weight": "colwise", "bias": "null"}


def test_edges_alone_claim_nothing(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  head: {output: stream -> replicate}\n")
    assert claims(plan, "head") == {"weight": None, "bias": None}
    assert style(plan, "head") == "edges only"


def test_an_unknown_style_claims_without_a_style(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  head: colwize\n")
    (weight, _) = plan.by_fqn["head"].parameters
    assert (weight.style, str(weight.claim.pattern if weight.claim else None)) == (None, "head")


# ---------------------------------------------------------------- roots and matches


def test_a_leading_dot_stands_for_the_first_root_that_exists(tmp_path: Path) -> None:
    plan = resolved(tmp_path, "  .0.a: colwise\n", root="[model, layers, head]")
    assert plan.root == "layers"
    assert style(plan, "layers.0.a") == "colwise"
    assert resolved(tmp_path, "  .layers.0.a: colwise\n").root == ""
    absent = resolved(tmp_path, "  .0.a: colwise\n  head: colwise\n", root="[model]")
    assert absent.root is None
    assert [len(matched.fqns) for matched in absent.rules] == [0, 1]


def test_each_alternative_has_its_matches(tmp_path: Path) -> None:
    (rule,) = resolved(tmp_path, "  layers.*.{a,c}: colwise\n").rules
    assert [(m.alternative.text, len(m.fqns)) for m in rule.matches] == [("layers.*.a", 3), ("layers.*.c", 0)]
    assert rule.fqns == ("layers.0.a", "layers.1.a", "layers.2.a")
