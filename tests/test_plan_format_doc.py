"""docs/plan-format.md says what the code does: its examples load, and it leaves no key and no style out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardplan.document import Fsdp, PlanFile, Precision, References, RuleOptions, UnitOptions
from shardplan.load import load_plan
from shardplan.merge import merge, resolve_layers
from shardplan.styles import STYLES

TEXT = (Path(__file__).parents[1] / "docs" / "plan-format.md").read_text()
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_loads(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(example)
    assert merge(resolve_layers(load_plan(path))).rules


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("options", [PlanFile, RuleOptions, Fsdp, UnitOptions, Precision, References])
def test_every_key_is_explained(options: type[PlanFile]) -> None:
    assert [key for key in options.model_fields if f"`{key}`" not in TEXT] == []


def test_the_table_of_styles_has_each_style() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", TEXT, re.MULTILINE))
    assert {name for name in STYLES if name not in rows} == set()
