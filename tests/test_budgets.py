"""What ``plan-compile`` may cost: seconds and memory, measured in processes of their own.

Seconds are CPU seconds of the whole process, interpreter included, so that a busy machine does not fail the test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from golden import ROOT

MEASURED = """
import json, resource, sys, time
{before}
imports = time.process_time()
from shardplan.cli import command
code = 0
try:
    command({args!r})
except SystemExit as left:
    code = left.code
spent = {{"code": code, "imports": imports, "check": time.process_time() - imports, "torch": "torch" in sys.modules,
          "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)}}
print(json.dumps(spent), file=sys.stderr)
"""


def measured(*args: str, before: str = "") -> dict[str, Any]:
    """Exit code, CPU seconds of ``before`` and of the command, whether torch was imported, peak memory in GiB."""
    script = MEASURED.format(args=list(args), before=before)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    spent: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    return spent


@pytest.mark.processes  # a process of its own, and seconds of it
def test_checking_the_largest_model_on_the_largest_mesh() -> None:
    """405 B parameters on 8192 ranks, both modes."""
    imports = "import torch, transformers; from transformers import LlamaForCausalLM"
    spent = measured("--check", "llama", "--model", "llama-3.1-405b", "--mesh", "dp=1024,tp=8", before=imports)
    assert spent["code"] == 0
    assert spent["check"] <= 1.5, spent
    assert spent["peak"] < 1.5, spent


@pytest.mark.processes  # a process of its own, and seconds of it
def test_printing_the_largest_model() -> None:
    """With the check at each of the seven tp degrees that 8192 ranks allow up to 64."""
    imports = "import torch, transformers; from transformers import LlamaForCausalLM"
    spent = measured("llama", "--model", "llama-3.1-405b", "--mesh", "dp=1024,tp=8", before=imports)
    assert spent["code"] == 0
    assert spent["check"] <= 3, spent


@pytest.mark.parametrize("content", ["format: 1\nrulez: {}\n", "format: 1\nrules: {.a: {style: 3}}\n", "a: [\n"])
def test_errors_of_the_file_alone_come_at_once(tmp_path: Path, content: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(content)
    spent = measured("--check", str(plan), "--model", "llama-3.1-405b", "--mesh", "dp=1024,tp=8")
    assert spent["code"] == 1
    assert not spent["torch"]
    assert spent["imports"] + spent["check"] < 0.5, spent


def test_a_plan_without_a_model_needs_no_torch(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("format: 1\nrules: {.a: colwise}\n")
    spent = measured("--check", str(plan))
    assert (spent["code"], spent["torch"]) == (0, False)
