"""A run that is stopped and resumed goes on as one that was not: on its mesh or another, under its plan or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

import checkpoint_jobs
import tolerances
from pool import Pool
from shardplan import CheckpointError, latest_checkpoint, save_checkpoint
from shardplan.checkpoint import resume as resumes
from shardplan.checkpoint import state as states
from shardplan.checkpoint import store
from shardplan.checkpoint.state import Trained
from shardplan.mesh import parse_mesh
from shardplan.weights import Stored
from test_weights import different

# model, saved on and whether in the background, resumed on, plan then
CASES: list[tuple[str, str, bool, str, Any]] = [
    ("llama-tied", "dp=2,tp=2", False, "dp=2,tp=2", None),
    ("phi3", "dp=2,tp=2", True, "dp=2,tp=2", None),
    ("phi3", "dp=2,tp=2", False, "tp=4", None),
    ("llama-odd", "tp=2", True, "dp=4", None),
    ("llama-odd", "dp=4", False, "dp=2,tp=2", None),
    ("nemotron-h", "dp=2,tp=2", False, "tp=1", None),
    ("nemotron-h", "tp=1", True, "dp=2,tp=2", None),
    ("mixtral", "dp=2,tp=2", False, "dp=1,tp=2", None),
    ("phi3", "dp=2,tp=2", False, "dp=2", {"model.embed_tokens": None}),
    ("gpt2", "dp=2", False, "tp=2", None),
]


@pytest.mark.parametrize(("name", "before", "asynchronous", "after", "plan"), CASES)
def test_ten_steps(
    pool: Pool, name: str, before: str, asynchronous: bool, after: str, plan: Any, tmp_path: Path
) -> None:
    arguments = name, before, str(tmp_path), asynchronous
    ranks = pool.run(parse_mesh(before).size, checkpoint_jobs.stopped, *arguments, shared=True)
    state, losses, _ = ranks[0]
    results = pool.run(parse_mesh(after).size, checkpoint_jobs.resumed, name, after, str(tmp_path), plan, shared=True)
    for rank, (read, resumed_losses, numbers, found, messages) in enumerate(results):
        said = [message for message in messages if rank == 0]
        assert messages == said
        assert any("goes on under plan" in message for message in said) == (bool(plan) and rank == 0)
        assert any("random state" in message for message in said) == (before != after and rank == 0)
        assert different(state, read) == []
        assert (found.step, found.saved_mesh) == (checkpoint_jobs.HALF, before)
        assert bool(found.plan_changes) == bool(plan)
        assert found.random_state == (before == after)
        if found.random_state:
            assert numbers == ranks[rank][2]
        if after == before:
            assert resumed_losses == losses
        assert resumed_losses == pytest.approx(losses, rel=tolerances.TRAINING_LOSS)


@pytest.mark.parametrize(
    ("names", "latest"),
    [
        (["step-9", "step-10"], "step-10"),
        (["step-99999999", "step-100000000"], "step-100000000"),
        (["step-00000003", "step-final", "step-9.bak", "step-", "step--4", "step-5-copy", "steps-7"], "step-00000003"),
        (["step-00000003", "step-00000003.previous"], "step-00000003"),
        (["step-00000002", "step-00000003.previous"], "step-00000003.previous"),
        (["step-00000004", "step-00000003.previous"], "step-00000004"),
        (["step-final"], None),
        ([], None),
    ],
)
def test_the_latest_is_that_of_the_highest_number(tmp_path: Path, names: list[str], latest: str | None) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "shardplan.json").touch()
    (tmp_path / "step-999999999999").mkdir()  # not finished
    assert latest_checkpoint(tmp_path) == (tmp_path / latest if latest is not None else None)


def test_a_folder_of_checkpoints_may_be_called_like_one(tmp_path: Path) -> None:
    run = tmp_path / "step-by-step"
    (run / "step-3").mkdir(parents=True)
    (run / "step-3/shardplan.json").touch()
    assert resumes._finished(run) == run / "step-3"


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (2.0, TypeError), ("3", TypeError)])
def test_a_step_that_nobody_would_find_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: Any, error: type[Exception]
) -> None:
    monkeypatch.setattr(store, "required_of", lambda _: None)
    with pytest.raises(error):
        save_checkpoint(tmp_path, None, step=step)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_optimizers_groups_are_those_of_the_checkpoint() -> None:
    """And not those that it was made with."""
    decayed, plain = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [decayed]}, {"params": [plain], "weight_decay": 0.0}]
    trained = Trained(torch.optim.AdamW(groups, lr=1.0, weight_decay=0.5), {}, {"decayed": 0, "plain": 1})
    saved = [{**group, "lr": 0.25, "weight_decay": 0.125} for group in trained.groups()]
    trained.restore_groups(saved)
    for group, parameter in zip(trained.optimizer.param_groups, (decayed, plain), strict=True):
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)
        assert group["params"] == [parameter]
    with pytest.raises(CheckpointError, match="hold other parameters"):
        trained.require_alike(saved[::-1])


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_state_in_the_dtype_of_its_parameter_follows_it(pool: Pool, tmp_path: Path, kind: str) -> None:
    """A run in bfloat16 that goes on in float32."""
    for faults in pool.run(4, checkpoint_jobs.widened, kind, str(tmp_path)):
        assert faults == []


class Counting:
    """A scheduler whose state is a list that it goes on writing in."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


def test_what_is_saved_in_the_background_is_the_state_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "stored_tensors", lambda _: [])
    scheduler: Any = Counting()
    state = store._state(nn.Linear(2, 2), None, scheduler, 0, states.itself)
    scheduler.seen.append(1)
    assert state["scheduler"] == {"state": ({"seen": []},), "kind": ("Counting",)}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Parameter, nn.Parameter]:
    """Two sections of the only parameter of a model."""
    parts = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4, 3))
    monkeypatch.setattr(states, "stored_tensors", lambda _: [Stored("packed", parts)])
    return parts


def test_an_optimizer_of_another_model_is_refused(packed: tuple[nn.Parameter, nn.Parameter]) -> None:
    optimizer = torch.optim.SGD([*packed, nn.Parameter(torch.zeros(2))])
    with pytest.raises(CheckpointError, match="1 of the optimizer's parameters are not the model's"):
        Trained.of(nn.Module(), optimizer)


def test_sections_in_different_groups_are_refused(packed: tuple[nn.Parameter, nn.Parameter]) -> None:
    optimizer = torch.optim.SGD([{"params": [part]} for part in packed])
    with pytest.raises(CheckpointError, match="the sections of packed are in different groups of the optimizer"):
        Trained.of(nn.Module(), optimizer)


def test_state_that_nobody_can_reshard_is_refused(packed: tuple[nn.Parameter, nn.Parameter]) -> None:
    """As Adafactor keeps it: a number for each row."""
    optimizer = torch.optim.Adafactor(packed)
    for part in packed:
        part.grad = torch.ones_like(part)
    optimizer.step()
    with pytest.raises(
        CheckpointError, match=r"row_var of packed has shape \(2, 1\), neither the parameter's nor that"
    ):
        Trained.of(nn.Module(), optimizer).state()


@pytest.mark.parametrize(("saved", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")])
def test_a_step_counter_lies_where_the_kernel_of_the_checkpoint_wants_it(saved: dict[str, Any], device: str) -> None:
    """Its group's flags are restored with it. Parameters on the meta device stand for those of another one."""
    entry = Stored("weight", (torch.empty(2, device="meta"),))
    properties = TensorProperties(torch.float32)
    about = TensorStorageMetadata(properties, torch.Size(()), [])
    assert states._blank_of(entry, "step", about, torch.float32, saved).device.type == device


def test_an_optimizer_without_memory_is_refused() -> None:
    """Its state would be without memory, too, and the next step would raise."""
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match="load the weights first, then make the optimizer"):
        Trained.of(model, torch.optim.AdamW(model.parameters()))
