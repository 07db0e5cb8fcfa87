"""The examples under torchrun: one trains as one process does, one goes on where it stopped."""

import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from demo import TOLERANCE
from tiny_training import Setup, tiny_llama, train_alone

EXAMPLES = Path(__file__).parents[1] / "docs/examples"
STEPS = 3

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("arguments", [["--tp", "2"], ["--dp", "2", "--no-sequence-parallel"]])
def test_train_under_torchrun(arguments: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLES / "train.py"), "--steps", str(STEPS), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert losses == pytest.approx(list(islice(train_alone(Setup()), STEPS)), abs=TOLERANCE + 5e-5)  # four digits shown


def test_train_without_torchrun_says_how_to_start_it() -> None:
    result = subprocess.run([sys.executable, EXAMPLES / "train.py"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "start it with torchrun" in result.stderr


def test_finetuning_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What comes out is bit-equal to that of a run without a break, and is read by transformers alone."""
    tiny_llama().save_pretrained(tmp_path / "in")
    out, checkpoints = tmp_path / "out", tmp_path / "out.checkpoints"
    first = finetune(tmp_path / "in", out)
    expected = LlamaForCausalLM.from_pretrained(out).state_dict()
    shutil.rmtree(out)
    shutil.rmtree(checkpoints / "step-00000004")
    second = finetune(tmp_path / "in", out)
    assert second.splitlines() == ["going on after step 2", *first.splitlines()[2:]]
    actual = LlamaForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


def finetune(source: Path, target: Path) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--tp", "2", "--steps", "4", "--save-every", "2"]
    command = [*torchrun, str(EXAMPLES / "finetune.py"), str(source), str(target), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
