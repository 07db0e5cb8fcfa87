"""Expected outputs, written down: ``python tests/golden.py`` (``make golden``) writes them all anew.

A broken plan, ``tests/broken_plans/SP102.yaml``, starts with a comment that holds the arguments of
``plan-compile --check``; what that prints is beside it in ``SP102.txt``.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from click.testing import CliRunner, Result

from shardplan.cli import command
from shardplan.resources import shipped_plans

ROOT = Path(__file__).parents[1]
BROKEN = ROOT / "tests" / "broken_plans"
COMPILED = ROOT / "tests" / "golden"
LLAMA = ("--model", "llama-3.1-8b", "--mesh", "dp=2,tp=4")
TINY = ("--model", "broken_models:llama", "--mesh", "dp=2,tp=2")
MODES = {"tp": "--no-sequence-parallel", "sp": "--sequence-parallel"}


def broken_plans() -> list[Path]:
    return sorted(BROKEN.glob("*.yaml"))


def arguments(plan: Path) -> list[str]:
    first = plan.read_text(encoding="utf-8").splitlines()[0].removeprefix("#")
    return shlex.split(first) if "--" in first else []


def checked(plan: Path) -> Result:
    """What ``plan-compile --check`` says to a broken plan. Names of files start at the working directory, the root."""
    return _run("--check", str(plan.relative_to(ROOT)), *arguments(plan))


def compiled() -> dict[Path, str]:
    """What ``plan-compile`` prints of the shipped plans, and as JSON of a small model, by the file it is kept in."""
    outputs = {}
    for mode, switch in MODES.items():
        for name in shipped_plans():
            outputs[COMPILED / f"{name}-{mode}.txt"] = printed(f"plans/{name}.yaml", *LLAMA * (name == "llama"), switch)
        outputs[COMPILED / f"llama-{mode}.json"] = printed("plans/llama.yaml", *TINY, switch, "--format", "json")
    return outputs


def printed(*args: str) -> str:
    result = _run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def _run(*args: str) -> Result:
    """Without catching what the command raises: a crash is not an output."""
    return CliRunner().invoke(command, args, catch_exceptions=False)


def main() -> None:
    from diagnostics_doc import DOCUMENT, text

    os.chdir(ROOT)
    COMPILED.mkdir(exist_ok=True)
    for plan in broken_plans():
        plan.with_suffix(".txt").write_text(checked(plan).stdout, encoding="utf-8")
    for path, output in compiled().items():
        path.write_text(output, encoding="utf-8")
    DOCUMENT.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
