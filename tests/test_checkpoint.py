"""From a folder of transformers into a sharded model and back: bit for bit, whatever the plan and the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import checkpoint_jobs
import tiny_models
from pool import Pool
from shardplan.mesh import parse_mesh

ODD = {"vocab_size": 257}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ODD, "llama-tied": ODD, "qwen3": ODD, "gemma3": ODD, "gemma3-vision": ODD, "nemotron-h": ODD, "phi3": ODD,
    "gpt2": {}, "mixtral": {},
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
        pool.run(size, checkpoint_jobs.through, name, str(source), targets, FAMILIES[name])
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
