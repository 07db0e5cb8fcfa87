"""What all tests share: no network, one pool of processes, and GPU tests only where there is a GPU."""

import os
from collections.abc import Iterator
from functools import partial

import pytest

from pool import LentRanks, Pool

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers: a look-up is a bug, not a wait
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers inherit it


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The pool of gloo processes; a test that uses it is marked ``processes``."""
    processes = Pool()
    yield processes
    processes.close()


@pytest.fixture
def verify_on_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--verify` and `verify_plan` run on the pool."""
    for module in ("shardplan.command.verify", "shardplan.verify.ranks"):
        monkeypatch.setattr(f"{module}.LocalRanks", partial(LentRanks, pool))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
