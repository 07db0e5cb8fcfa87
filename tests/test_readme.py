"""The README shows what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_plan_shown_is_the_shipped_one() -> None:
    assert (ROOT / "plans/llama.yaml").read_text(encoding="utf-8") in README


def test_every_link_leads_to_a_file() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"make (\w+)", README)) <= set(targets)
