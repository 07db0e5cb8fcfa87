"""What goes wrong with files: every rank gets the same message, soon, and nothing that was whole is lost.

Real processes and real files: ranks that are killed, files that are cut short, a disk that is full.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fault_jobs
import tiny_models
from pool import Pool, PoolError
from shardplan.checkpoint import store
from shardplan.checkpoint.folder import INDEX, open_weights
from shardplan.checkpoint.state import OTHERS

WITHIN = 30  # seconds until a rank knows
WHAT = ("weights", "checkpoint", "background")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of several files."""
    folder = tmp_path / "source"
    tiny_models.build(fault_jobs.NAME).save_pretrained(folder, max_shard_size=fault_jobs.FILES)  # type: ignore[operator]
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def agreed(messages: list[fault_jobs.Said]) -> str:
    """What every rank was told."""
    texts = {text for text, _ in messages}
    assert len(texts) == 1, texts
    assert max(seconds for _, seconds in messages) < WITHIN
    return texts.pop()


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("truncated", "SECOND of 1000 bytes is not whole"),
        ("missing", "SECOND is missing, which model.safetensors.index.json names"),
        ("no index", "it holds neither model.safetensors nor model.safetensors.index.json"),
        ("no folder", "there is no such folder"),
        ("bad index", "model.safetensors.index.json is not an index"),
        ("null in the index", "is not an index: TypeError('the file of lm_head.weight is None')"),
        ("a folder as a file", "SECOND is a folder, not a file"),
        ("a folder as the index", "model.safetensors.index.json is a folder, not a file"),
        ("bad generation config", "generation_config.json cannot be read: "),
        ("wrong index", "SECOND does not hold lm_head.weight, which model.safetensors.index.json says it does"),
    ],
)
def test_a_folder_that_is_not_whole(pool: Pool, source: Path, fault: str, expected: str) -> None:
    second = files(source)[1]
    index = source / INDEX
    if fault == "truncated":
        os.truncate(second, 1000)
    elif fault == "missing":
        second.unlink()
    elif fault == "no index":
        index.unlink()
    elif fault == "no folder":
        source = source / "nowhere"
    elif fault == "bad index":
        index.write_text("{}")
    elif fault.startswith("a folder as"):
        path = index if fault == "a folder as the index" else second
        path.unlink()
        path.mkdir()
    elif fault == "bad generation config":
        (source / "generation_config.json").write_text("{")
    else:
        content = json.loads(index.read_text())
        content["weight_map"]["lm_head.weight"] = None if fault == "null in the index" else second.name
        index.write_text(json.dumps(content))
    results = pool.run(4, fault_jobs.of_weights, str(source))
    message = agreed([said for said, _ in results])
    assert message.startswith(f"cannot load weights from {source}: ")
    assert expected.replace("SECOND", second.name) in message
    assert all(untouched for _, untouched in results)


def test_tensors_that_are_not_the_models_are_listed_together(pool: Pool, tmp_path: Path) -> None:
    tiny_models.build(fault_jobs.NAME).save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["nobody.weight"] = tensors.pop("lm_head.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    results = pool.run(4, fault_jobs.of_weights, str(tmp_path))
    assert agreed([said for said, _ in results]) == (
        f"cannot load weights from {tmp_path}: its tensors are not the model's; missing: lm_head.weight; not in the "
        "model: nobody.weight; of another shape: model.norm.weight is (63,), not (64,); of another kind: "
        "model.layers.1.mlp.up_proj.weight is torch.int8, not torch.float32"
    )
    assert all(untouched for _, untouched in results)


@pytest.mark.parametrize("differ", [False, True])
def test_tied_weights_that_differ_are_refused(pool: Pool, tmp_path: Path, differ: bool) -> None:
    """Of one weight that a folder has twice; if one differs from the other in a row that rank 3 holds, none is read."""
    model = tiny_models.build("llama-tied")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, 0] += differ
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    results = pool.run(4, fault_jobs.of_weights, str(tmp_path), "", "llama-tied")
    message = agreed([said for said, _ in results])
    assert ("tied in the model, and different in the checkpoint: model.embed_tokens.weight" in message) == differ
    assert all(untouched == differ for _, untouched in results)


@pytest.mark.parametrize("fault", ["_opened", "read_into"])
def test_what_happens_to_one_rank_is_told_to_all(pool: Pool, source: Path, fault: str) -> None:
    results = pool.run(4, fault_jobs.of_weights, str(source), fault)
    message = agreed([said for said, _ in results])
    assert message == f"cannot load weights from {source}: [Errno 5] Input/output error: 'the disk' (rank 1)"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("truncated", "__1_0.distcp has 100 bytes of "),
        ("missing", "__1_0.distcp is missing"),
        ("unfinished", "no finished checkpoint is there"),
        ("bad marker", "shardplan.json cannot be read"),
    ],
)
def test_a_checkpoint_that_is_not_whole(pool: Pool, tmp_path: Path, fault: str, expected: str) -> None:
    pool.run(4, fault_jobs.written, str(tmp_path), 1, (3,))
    step = tmp_path / "step-00000003"
    if fault == "truncated":
        os.truncate(step / "__1_0.distcp", 100)
    elif fault == "missing":
        (step / "__1_0.distcp").unlink()
    elif fault == "unfinished":
        (step / "shardplan.json").unlink()
    else:
        (step / "shardplan.json").write_text("{}")
    message = agreed(pool.run(4, fault_jobs.of_checkpoint, str(tmp_path)))
    assert message.startswith(f"cannot load a checkpoint from {tmp_path}: ")
    assert expected in message


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("what", WHAT)
def test_a_full_disk(pool: Pool, tmp_path: Path, what: str) -> None:
    with small_disk(tmp_path, kilobytes=400) as (disk, limited):
        messages = pool.run(4, fault_jobs.into, str(disk / "out"), what, limited)
        message = agreed(messages)
        assert message.startswith("cannot save ")
        assert message.count("File too large" if limited else "No space left on device") == 1
        assert left(disk) == []


@pytest.mark.parametrize("what", WHAT)
def test_a_folder_without_write_permission(pool: Pool, what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder) / "locked"
        locked.mkdir()
        Path(folder).chmod(0o755)
        locked.chmod(0o555)
        user = fault_jobs.NOBODY if os.geteuid() == 0 else None
        message = agreed(pool.run(4, fault_jobs.into, str(locked / "out"), what, False, user))
        assert message.startswith("cannot save ")
        assert "Permission denied" in message
        assert left(locked) == []


def test_a_write_protected_folder_in_the_old_one_is_kept(pool: Pool) -> None:
    """And does not stay behind when the old one goes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        (out / "mine").mkdir(parents=True)
        (out / "mine/notes").write_text("keep")
        if os.geteuid() == 0:
            for path in (Path(folder), out, out / "mine", out / "mine/notes"):
                os.chown(path, fault_jobs.NOBODY, -1)
        Path(folder).chmod(0o755)
        user = fault_jobs.NOBODY if os.geteuid() == 0 else None
        for _ in range(2):
            (out / "mine").chmod(0o555)
            assert agreed(pool.run(4, fault_jobs.into, str(out), "weights", False, user)) == ""
            assert (out / "mine/notes").read_text() == "keep"
            assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_save_waits_for_the_one_before(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, fault_jobs.twice_at_once, str(tmp_path / "run")) == [[{2.0}, {2.0}]] * 4


def test_a_save_that_is_cut_off_says_so_though_nobody_waits(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(4, fault_jobs.ended_too_early, str(tmp_path / "run"))
    message = agreed([told for told, _ in results])
    assert message.startswith(f"cannot save the checkpoint {tmp_path / 'run' / 'step-00000001'}: ValueError(")
    assert message.endswith("; wait() before destroy_process_group()")
    assert [messages for _, messages in results] == [[message]] * 4


def test_what_does_not_fit_is_refused_before_anything_is_read(pool: Pool, tmp_path: Path) -> None:
    told, values = zip(*pool.run(4, fault_jobs.refused_before_reading, str(tmp_path / "run")), strict=True)
    said = {what: agreed([messages[what] for messages in told]) for what in told[0]}
    assert "the optimizer's groups hold other parameters" in said["groups"]
    assert said["optimizer"].endswith("it holds the state of SGD, and the optimizer is AdamW")
    assert said["scheduler"].endswith("it holds the state of StepLR, and the scheduler is ExponentialLR")
    assert said["schedulers"].endswith(
        "it holds the state of SequentialLR(LinearLR, CosineAnnealingLR), and the scheduler is "
        "SequentialLR(LinearLR, ExponentialLR)"
    )
    assert said["fewer"].endswith(
        "it has optimizer state of what the optimizer does not train: model.embed_tokens.weight"
    )
    assert said["without"].endswith("step-00000001 was saved without optimizer and scheduler")
    assert "model.embed_tokens.weight is torch.float16, not torch.bfloat16" in said["half"]
    assert "ranks found different ones, but all must see one file system" in said["rank"]
    assert list(values) == [{2.0}] * 4


def test_what_is_whole_and_not_in_its_place_is_kept(tmp_path: Path) -> None:
    """As a process leaves it that is killed in the middle of an exchange on NFS."""
    for name, whole in ((".step-1.partial", False), (".step-2.partial", True), (".mine.partial", False)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "shardplan.json").touch()
    store._clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.partial", ".step-2.partial"]


def test_a_scheduler_of_each_ranks_own_is_refused(pool: Pool, tmp_path: Path) -> None:
    """One state is saved for all."""
    told = pool.run(4, fault_jobs.with_schedulers_of_their_own, str(tmp_path / "run"))
    said = {what: agreed([messages[what] for messages in told]) for what in told[0]}
    assert "the scheduler's state differs between ranks" in said["state"]
    others = f"{OTHERS}: optimizer SGD (rank 0); neither (rank 1, 2, 3)"
    assert said["one saves"].endswith(others)
    assert said["one loads"].endswith(others)
    assert "Can't pickle local object" in said["unwritable"]
    assert not (tmp_path / "run").exists()


def test_something_else_in_the_place_of_a_checkpoint_is_kept(pool: Pool, tmp_path: Path) -> None:
    mine = tmp_path / "run/step-00000009/mine"
    mine.mkdir(parents=True)
    message = agreed(pool.run(4, fault_jobs.into, str(tmp_path / "run"), "checkpoint"))
    assert message.endswith("something else is there, which is not replaced")
    assert mine.is_dir()


def test_weights_wait_for_a_checkpoint_below_their_folder(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, fault_jobs.both_at_once, str(tmp_path / "out")) == [["checkpoint", "weights"]] * 4
    assert (tmp_path / "out/run/step-00000001/shardplan.json").is_file()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("folder", "ranks were given different folders"),
        ("step", "ranks were given different folders"),
        ("disk", "is not the first rank's: all ranks must see one file system"),
    ],
)
def test_ranks_that_do_not_write_to_one_folder(pool: Pool, tmp_path: Path, how: str, message: str) -> None:
    for told in zip(*pool.run(4, fault_jobs.not_one_folder, str(tmp_path / "out"), how), strict=True):
        said = {words for words, _ in told}
        assert len(said) == 1
        assert message in next(iter(said))
    assert list(tmp_path.rglob("*")) == ([tmp_path / "out"] if how == "disk" else [])


def test_one_file_counts_where_an_index_is_left_of_several(tmp_path: Path) -> None:
    """As it does for transformers, which leaves such an index behind."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    (tensor,) = open_weights(tmp_path).values()
    assert tensor.shape == (2,)


def test_a_file_where_the_folder_should_be(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert agreed(pool.run(4, fault_jobs.into, str(tmp_path / "out"), "weights")).endswith("it is a file")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_mount_point_is_refused_before_anything_is_written(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert agreed(pool.run(4, fault_jobs.into_a_mount_point, str(tmp_path / "out"))) == (
        f"cannot save weights to {tmp_path / 'out'}: it is a mount point, which no other folder can take the place of: "
        "give a folder in it"
    )
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


@pytest.mark.parametrize(
    ("what", "moment"),
    [("weights", "file"), ("weights", "before"), ("weights", "after"), ("checkpoint", "file"), ("background", "file")],
)
def test_a_process_that_is_killed_while_it_saves(pool: Pool, tmp_path: Path, what: str, moment: str) -> None:
    """What was there is whole, or what was to come is, and the next save succeeds."""
    target, messages = tmp_path / "run", tmp_path / "messages"
    messages.mkdir()
    pool.run(4, fault_jobs.written, str(target), 1, () if what == "weights" else (3,))
    with pytest.raises(PoolError, match="died with exit code -9"):
        pool.run(4, fault_jobs.killed, str(target), what, moment, str(messages))
    left = [path.read_text().partition(" ") for path in messages.iterdir()]
    assert len(left) == 3
    named = target if what == "weights" else target / "step-00000009"
    assert agreed([(message, float(seconds)) for seconds, _, message in left]) == (
        f"cannot save {'weights to' if what == 'weights' else 'the checkpoint'} {named}: a rank was lost: "
        "its process ended, and its own output says why"
    )
    if what == "weights":
        assert numbers_in(target) == {2.0 if moment == "after" else 1.0}
        pool.run(4, fault_jobs.written, str(target), 3)
        assert numbers_in(target) == {3.0}
    else:
        assert not (target / "step-00000009").exists()
        assert agreed(pool.run(4, fault_jobs.of_checkpoint, str(target))) == ""
        (target / ".step-00000007.partial").mkdir()  # as the first rank leaves it when it is killed
        pool.run(4, fault_jobs.written, str(target), 1, (10,))
        assert (target / "step-00000010/shardplan.json").is_file()
    assert [path.name for path in tmp_path.rglob("*") if "partial" in path.name] == []


@pytest.mark.parametrize(("moment", "number"), [("before", 1.0), ("after", 2.0)])
def test_a_process_that_is_killed_while_it_replaces_a_checkpoint(
    pool: Pool, tmp_path: Path, moment: str, number: float
) -> None:
    target, messages = tmp_path / "run", tmp_path / "messages"
    messages.mkdir()
    pool.run(4, fault_jobs.written, str(target), 1, (9,))
    with pytest.raises(PoolError, match="died with exit code -9"):
        pool.run(4, fault_jobs.killed, str(target), "checkpoint", moment, str(messages))
    assert pool.run(4, fault_jobs.numbers_in, str(target)) == [{number}] * 4


def numbers_in(folder: Path) -> set[float]:
    """The values of all parameters, as transformers reads them."""
    model = type(tiny_models.build(fault_jobs.NAME)).from_pretrained(folder)  # type: ignore[attr-defined]
    return {value for parameter in model.parameters() for value in parameter.unique().tolist()}


def left(folder: Path) -> list[str]:
    """Files below; folders that were made on the way do no harm."""
    return [str(path) for path in folder.rglob("*") if path.is_file()]


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[tuple[Path, bool]]:
    """A file system of its own; where none may be mounted, a folder, and that files are to be limited instead."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield disk, not mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
