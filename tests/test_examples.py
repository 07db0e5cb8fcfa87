"""The example under torchrun trains as one process does."""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from demo import TOLERANCE
from tiny_training import Setup, train_alone

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
