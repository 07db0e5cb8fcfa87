"""From a folder of transformers into a sharded model and back: bit for bit, whatever the plan and the mesh."""

from __future__ import annotations

import os
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import checkpoint_jobs
import tiny_models
from pool import Pool
from shardplan.checkpoint import folder as folders
from shardplan.checkpoint.progress import tracked
from shardplan.checkpoint.unsharded import Unsharded
from shardplan.mesh import parse_mesh

ODD = {"vocab_size": 257}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ODD, "llama-tied": ODD, "qwen3": ODD, "gemma3": ODD, "gemma3-vision": ODD, "nemotron-h": ODD, "phi3": ODD,
    "gpt2": {}, "mixtral": ODD, "nemotron-h-backbone": {},
}  # fmt: skip
MESHES = {4: ("dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=1"), 1: ("tp=1",)}  # by their size
SMALL_FILES = 100_000  # bytes: several files of each model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_comes_back_bit_equal(pool: Pool, name: str, tmp_path: Path) -> None:
    """In one process, from_pretrained reads what was saved from every mesh as it reads what transformers saved."""
    source = tmp_path / "in"
    original = saved(name, source, **FAMILIES[name])
    for size, meshes in MESHES.items():
        targets = {mesh: str(tmp_path / mesh) for mesh in meshes}
        pool.run(size, checkpoint_jobs.through, name, str(source), targets, FAMILIES[name], shared=True)
        for mesh, target in targets.items():
            assert different(original, Path(target)) == [], mesh
            assert names_in(Path(target)) == names_in(source), mesh
            assert len(list(Path(target).glob("*.safetensors"))) > 1
    assert {path.name for path in tmp_path.iterdir()} == {"in", *MESHES[4], *MESHES[1]}


def saved(name: str, folder: Path, **changes: Any) -> Any:
    model: Any = tiny_models.build(name, **changes)
    model.save_pretrained(folder, max_shard_size=SMALL_FILES)
    return model


def names_in(folder: Path) -> list[str]:
    """What the files of a folder call their tensors."""
    return sorted(name for file in folder.glob("*.safetensors") for name in load_file(file))


def different(original: nn.Module, folder: Path) -> list[str]:
    """Tensors of a folder, read by transformers in this process, that are not those of ``original``."""
    read, report = type(original).from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    complaints = [f"{kind}: {names}" for kind, names in report.items() if names]
    expected, actual = original.state_dict(), read.state_dict()
    buffers, read_buffers = dict(original.named_buffers()), dict(read.named_buffers())
    assert expected.keys() == actual.keys()
    return [
        *complaints,
        *(name for name in expected if not torch.equal(expected[name], actual[name])),
        *(name for name in buffers if not torch.equal(buffers[name], read_buffers[name])),
    ]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama", "dp=2,tp=2"), ("llama-tied", "tp=4"), ("gemma3", "dp=4"), ("phi3", "dp=2,tp=2"), ("mixtral", "tp=2")],
)
def test_a_loaded_model_computes_and_trains_as_the_unsharded_one(
    pool: Pool, name: str, mesh: str, tmp_path: Path
) -> None:
    """Rotary tables and scales, which no file holds, included; tied parameters are one."""
    saved(name, tmp_path, **FAMILIES[name])
    for faults in pool.run(parse_mesh(mesh).size, checkpoint_jobs.loaded, name, mesh, str(tmp_path), FAMILIES[name]):
        assert faults == []


def test_buffers_that_a_module_above_computes(pool: Pool, tmp_path: Path) -> None:
    """Falcon-H1 fills a buffer of the mixers in the initialisation of the model around them; weights are the file's."""
    original: Any = checkpoint_jobs.falcon_h1()
    original.save_pretrained(tmp_path)
    expected = dict(original.named_buffers())
    assert len(expected["model.layers.1.mamba.mup_vector"].unique()) == 5
    for weights, buffers, drew in pool.run(2, checkpoint_jobs.loaded_falcon_h1, str(tmp_path)):
        assert buffers.keys() == expected.keys()
        assert all(torch.equal(buffers[name], expected[name]) for name in expected)
        assert all(torch.equal(weights[name], tensor) for name, tensor in original.state_dict().items())
        assert not drew


class _Flags(nn.Module):
    """Buffers on the meta device by name, of which ``computed`` is all that an initialisation fills."""

    def __init__(self, dtype: torch.dtype, value: Any) -> None:
        super().__init__()
        self.value = value
        for name in ("computed", "forgotten"):
            self.register_buffer(name, torch.empty(3, dtype=dtype, device="meta"), persistent=False)

    def initialize_weights(self) -> None:
        self.get_buffer("computed").fill_(self.value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.bool, False), (torch.bool, True), (torch.float32, 0.0), (torch.int64, 0), (torch.complex64, 1j)],
)
def test_a_buffer_that_nobody_computes_is_not_taken_for_computed(dtype: torch.dtype, value: Any) -> None:
    twin = _Flags(dtype, value)
    unsharded = Unsharded.__new__(Unsharded)
    unsharded._twin = twin
    computed = dict(unsharded.unsaved_buffers(dict(twin.named_buffers())))
    assert computed.keys() == {"computed"}
    assert torch.equal(computed["computed"], torch.full((3,), value, dtype=dtype))


@pytest.mark.parametrize("from_folder", [True, False])
def test_into_a_model_that_has_weights(pool: Pool, tmp_path: Path, from_folder: bool) -> None:
    """From a folder, and from tensors in memory."""
    saved("llama", tmp_path)
    source = str(tmp_path) if from_folder else None
    for faults in pool.run(4, checkpoint_jobs.loaded_again, "llama", "dp=2,tp=2", source):
        assert faults == []


def test_with_replicas_and_with_offload(pool: Pool, tmp_path: Path) -> None:
    original = saved("llama-tied", tmp_path / "in")
    targets = {"dp_replicate=2,dp=1,tp=2": str(tmp_path / "replicas")}
    pool.run(4, checkpoint_jobs.through, "llama-tied", str(tmp_path / "in"), targets, {})
    pool.run(4, checkpoint_jobs.offloaded, "llama-tied", "dp=2,tp=2", str(tmp_path / "in"), str(tmp_path / "offload"))
    assert different(original, tmp_path / "replicas") == []
    assert different(original, tmp_path / "offload") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_says_the_dtype(pool: Pool, tmp_path: Path, dtype: torch.dtype) -> None:
    """Of a folder in bfloat16; the folder that is saved says which dtype it is in."""
    original: Any = tiny_models.build("llama").to(torch.bfloat16)
    original.save_pretrained(tmp_path / "in")
    pool.run(2, checkpoint_jobs.in_dtype, "llama", "tp=2", str(tmp_path / "in"), str(tmp_path / "out"), dtype)
    read = type(original).from_pretrained(tmp_path / "out")
    assert read.dtype == read.config.dtype == dtype
    for name, tensor in original.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.to(dtype))


def test_a_folder_keeps_what_is_not_the_models(pool: Pool, tmp_path: Path) -> None:
    """Weights of an earlier save go."""
    source, target = tmp_path / "in", tmp_path / "out"
    original = saved("llama", source)
    target.mkdir()
    (target / "tokenizer.json").write_text("mine")
    (target / "runs").mkdir()
    (target / "runs/log").write_text("mine")
    (target / "model-00001-of-00099.safetensors").write_text("old")
    pool.run(4, checkpoint_jobs.through, "llama", str(source), {"dp=2,tp=2": str(target)}, {})
    assert different(original, target) == []
    assert (target / "tokenizer.json").read_text() == (target / "runs/log").read_text() == "mine"
    assert not (target / "model-00001-of-00099.safetensors").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_a_file_system_that_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    for number in (1, 2):
        partial = folders.beside(tmp_path / "out")
        folders.begin(partial)
        (partial / "file").write_text(str(number))
        folders.put_in_place(partial, tmp_path / "out")
        assert (tmp_path / "out/file").read_text() == str(number)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_what_is_kept_may_be_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: bool, linked: bool
) -> None:
    """Links to nowhere, pipes, files that may be neither linked nor read, and folders of them; none is opened."""
    target = tmp_path / "out"
    (target / "runs").mkdir(parents=True)
    for folder in (target, target / "runs"):
        (folder / "dangling").symlink_to("nowhere")
        os.mkfifo(folder / "pipe")
        (folder / "mine").write_text("mine")
    (target / "secret").write_text("secret")
    monkeypatch.setattr(folders, "_exchange", folders._exchange if exchanged else lambda one, other: False)
    monkeypatch.setattr(os, "link", refusing(os.link, "secret" if linked else ""))
    monkeypatch.setattr(shutil, "copy2", refusing(shutil.copy2, "secret"))
    opened: list[str] = []
    monkeypatch.setattr(folders, "sync", lambda path: opened.append(path.name))

    partial = folders.beside(target)
    folders.begin(partial)
    (partial / "model.safetensors").write_text("new")
    (partial / "code").mkdir()
    (partial / "code/model.py").write_text("new")
    folders.put_in_place(partial, target, keep_others=True)

    for folder in (target, target / "runs"):
        assert (folder / "dangling").readlink() == Path("nowhere")
        assert (folder / "pipe").is_fifo()
        assert (folder / "mine").read_text() == "mine"
    assert (target / "secret").read_text() == "secret"
    assert (target / "model.safetensors").read_text() == (target / "code/model.py").read_text() == "new"
    assert {"model.safetensors", "code", "model.py"} <= set(opened)
    assert not {"dangling", "pipe", "secret"} & set(opened)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_was_moved_comes_back_where_the_folder_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, partial = tmp_path / "out", folders.beside(tmp_path / "out")
    target.mkdir()
    (target / "secret").write_text("secret")
    folders.begin(partial)
    monkeypatch.setattr(os, "link", refusing(os.link, ""))
    monkeypatch.setattr(shutil, "copy2", refusing(shutil.copy2, ""))
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    monkeypatch.setattr(folders.Path, "rename", refusing(Path.rename, partial.name))
    with pytest.raises(PermissionError):
        folders.put_in_place(partial, target, keep_others=True)
    assert [path.name for path in target.iterdir()] == ["secret"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [partial.name, "out"]


def refusing(function: Any, name: str) -> Any:
    """``function``, which may not be called on a file of that name, or of any name."""

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if name in ("", Path(path).name):
            raise PermissionError(1, "Operation not permitted", str(path))
        return function(path, *args, **kwargs)

    return refuse


@pytest.mark.parametrize("odd", [False, True])
def test_a_model_that_is_none_of_transformers(pool: Pool, tmp_path: Path, odd: bool) -> None:
    state = checkpoint_jobs.Plain().state_dict()
    source = tmp_path / "in"
    source.mkdir()
    save_file(state, source / "model.safetensors")
    messages = pool.run(4, checkpoint_jobs.plain, str(source), str(tmp_path / "out"), odd)
    if odd:
        assert "in no checkpoint, and that transformers does not compute: table" in messages[0]
    else:
        assert messages == [""] * 4
        read = load_file(tmp_path / "out/model.safetensors")
        assert read.keys() == state.keys()
        assert all(torch.equal(read[name], state[name]) for name in state)


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_progress_is_shown_on_a_terminal_and_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: bool
) -> None:
    written = StringIO()
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", written)
    assert list(tracked([1, 2, 3], "loading MODEL", shown=shown)) == [1, 2, 3]
    assert ("loading MODEL" in written.getvalue()) == (terminal and shown)
