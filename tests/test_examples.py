"""The examples under torchrun: one trains as one process does, one goes on where it stopped."""

import re
import runpy
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import example_jobs
from demo import TOLERANCE
from pool import Pool
from tiny_training import Parallel, Setup, tiny_llama, train_alone

EXAMPLES = Path(__file__).parents[1] / "docs/examples"
STEPS = 3

pytestmark = pytest.mark.processes


def test_train_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLES / "train.py"), "--steps", str(STEPS), "--tp", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert losses == pytest.approx(list(islice(train_alone(Setup()), STEPS)), abs=TOLERANCE + 5e-5)  # four digits shown


def test_train_over_dp_alone(pool: Pool) -> None:
    expected = list(islice(train_alone(Setup()), STEPS))
    for losses in pool.run(2, example_jobs.trained, Parallel(2, 1, "llama", sequence_parallel=False), STEPS):
        assert losses == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("example", ["train.py", "finetune.py"])
def test_without_torchrun_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    monkeypatch.setattr(sys, "argv", [example, "in", "out"] if example == "finetune.py" else [example])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    assert left.value.code == 2
    assert "start it with torchrun" in capsys.readouterr().err


def test_finetuning_goes_on_where_it_stopped(pool: Pool, tmp_path: Path) -> None:
    """Under torchrun, then in other processes from the middle on.

    What comes out is bit-equal to that of a run without a break, and is read by transformers alone.
    """
    tiny_llama().save_pretrained(tmp_path / "in")
    out, checkpoints = tmp_path / "out", tmp_path / "out.checkpoints"
    first = finetune(tmp_path / "in", out)
    expected = LlamaForCausalLM.from_pretrained(out).state_dict()
    shutil.rmtree(out)
    shutil.rmtree(checkpoints / "step-00000004")
    second, _ = pool.run(2, example_jobs.finetuned, tmp_path / "in", out, checkpoints)
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
