"""Folders of safetensors: read lazily, and put in their place whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardplan.checkpoint.lazy import Box, LazyTensor, Source, lazy
from shardplan.checkpoint.together import CheckpointError, Ranks

LOG = logging.getLogger("shardplan")
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
OURS = (ONE_FILE, "model-?????-of-?????.safetensors", INDEX, "config.json", "generation_config.json")
# safetensors' names for dtypes, as `PySafeSlice.get_dtype` gives them
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _InFile(Source):
    """A tensor in a safetensors file; of a range only that range is read."""

    slices: Any

    def read_into(self, box: Box, out: Tensor) -> None:
        out.copy_(self.slices[box] if box else self.slices[...])


def open_weights(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of a Hugging Face folder, one file or an index of several, by name; none is read.

    Raises:
        CheckpointError: a file is missing, truncated, or does not hold what the index says.
    """
    tensors: dict[str, LazyTensor] = {}
    for path, names in _files(folder):
        if not path.exists():
            raise CheckpointError(f"{path.name} is missing, which {INDEX} names")
        _require_file(path)
        opened = _opened(path)
        held = list(opened.keys())
        for name in held if names is None else names:
            if name not in held:
                raise CheckpointError(f"{path.name} does not hold {name}, which {INDEX} says it does")
            slices = opened.get_slice(name)
            if slices.get_dtype() not in DTYPES:
                raise CheckpointError(f"{name} in {path.name} is of dtype {slices.get_dtype()}, which is not read")
            tensors[name] = lazy(tuple(slices.get_shape()), DTYPES[slices.get_dtype()], _InFile(slices))
    return tensors


def _require_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path.name} is {'a folder' if path.is_dir() else 'something else'}, not a file")


def _opened(path: Path) -> Any:
    """Mapped into memory: of a slice only its pages are read, and the kernel may drop them at any time."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path.name} of {size} bytes is not whole: {error}") from error


def _files(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The files, each with the names that the index gives it; None without an index.

    Of both kinds in one folder transformers reads the one file: saved into a folder that held several, it leaves their
    index behind.
    """
    if not folder.is_dir():
        raise CheckpointError("there is no such folder")
    index = folder / INDEX
    for path in (index, folder / ONE_FILE):
        _require_file(path)
    if (folder / ONE_FILE).is_file():
        yield folder / ONE_FILE, None
        return
    if not index.is_file():
        raise CheckpointError(f"it holds neither {ONE_FILE} nor {INDEX}")
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise TypeError(f"the file of {name} is {file!r}")
            by_file.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{INDEX} is not an index: {error!r}") from error
    for file, names in sorted(by_file.items()):
        yield folder / file, names


# ---------------------------------------------------------------- putting a folder in its place


def beside(folder: Path) -> Path:
    """Where a folder is written until it is whole: a name of its own, on the same file system."""
    return folder.parent / f".{folder.name}.partial"


def begin(partial: Path) -> None:
    """Make the folder to write in; what an earlier save that was killed left there goes.

    Raises:
        CheckpointError: it cannot.
    """
    if partial.exists():
        try:
            _remove(partial)
        except OSError as error:
            raise CheckpointError(f"{partial} is left of an earlier save and cannot be removed: {error}") from error
    partial.mkdir(parents=True)


def begin_on_all(partial: Path, ranks: Ranks, doing: str) -> None:
    """`begin`, by the first rank for all of them: one folder, which all of them see.

    Raises:
        CheckpointError: on every rank: it cannot be made, or some rank is on another file system.
    """
    ranks.require_same(str(partial), doing, "ranks were given different folders")
    with ranks.together(doing):
        if ranks.first:
            begin(partial)
    try:
        _require_one(partial, ranks, doing)
    except CheckpointError:
        if ranks.first:
            discard(partial)
        raise


def _require_one(folder: Path, ranks: Ranks, doing: str) -> None:
    # By a file that nobody has thought of before: an earlier save may have left such a folder on another disk.
    name = next(name for name in ranks.gather(uuid4().hex if ranks.first else "", doing) if name)
    with ranks.together(doing):
        if ranks.first:
            (folder / name).touch()
    with ranks.together(doing):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} is not the first rank's: all ranks must see one file system")
    with ranks.together(doing):
        if ranks.first:
            (folder / name).unlink()


def put_in_place(partial: Path, folder: Path, *, keep_others: bool = False) -> None:
    """Bring ``partial`` to disk, and let ``folder`` be it. What was there goes afterwards.

    Where there is something already, the two are exchanged in one step, so that there is a whole folder at any time. On
    a file system that cannot do that, the old one is called ``NAME.previous`` for the moment between two steps.

    Args:
        keep_others: have in the new folder what the old one holds beside weights and configs: a tokenizer, say, or
            other folders.
    """
    _sync_below(partial)  # before what is kept comes in, which was on disk already and may be no file at all
    unread = _keep_others(folder, partial) if keep_others else []
    moved: list[str] = []
    try:
        for name in unread:
            (folder / name).rename(partial / name)
            moved.append(name)
        sync(partial)
        old = _swap(partial, folder)
    except OSError:
        for name in moved:
            (partial / name).rename(folder / name)
        raise
    if old is not None:
        try:
            _remove(old)
        except OSError as error:
            LOG.warning("%s is in its place; what was there before cannot be removed: %s", folder, error)
    sync(folder.parent)


def _remove(folder: Path) -> None:
    """Folders in it that are write-protected as well, where they are ours."""
    for below in (folder, *folder.rglob("*")):
        if below.is_dir() and not below.is_symlink():
            with contextlib.suppress(OSError):
                below.chmod(0o700)
    shutil.rmtree(folder)


def _swap(partial: Path, folder: Path) -> Path | None:
    """Give ``partial`` the name of ``folder``; where what was there is now."""
    if not folder.exists():
        partial.rename(folder)
        return None
    if _exchange(partial, folder):
        return partial
    previous = folder.with_name(f"{folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    folder.rename(previous)
    try:
        partial.rename(folder)
    except OSError:
        previous.rename(folder)
        raise
    return previous


def _sync_below(folder: Path) -> None:
    """Links, pipes and the like have nothing to bring to disk, and opening them may fail or wait."""
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            sync(path)


def _keep_others(folder: Path, partial: Path) -> list[str]:
    """See `put_in_place`. Names of what can be neither linked nor read, and so has to be moved."""
    unread = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if any(fnmatch(path.name, ours) for ours in OURS) or os.path.lexists(partial / path.name):
            continue
        try:
            _keep(path, partial / path.name)
        except _UNREADABLE:
            discard(partial / path.name)
            unread.append(path.name)
    return unread


# What copying raises: of a file, of a pipe and the like, of a folder with one of these.
_UNREADABLE = (PermissionError, shutil.SpecialFileError, shutil.Error)


def _keep(path: Path, other: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, other, symlinks=True, copy_function=_linked)
        for below in (other, *other.rglob("*")):
            if below.is_dir() and not below.is_symlink():
                sync(below)
    else:
        _linked(path, other)


def _linked(path: str | Path, other: str | Path) -> None:
    """Another name for a file; a copy where the file system knows one name only."""
    try:
        os.link(path, other, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, other, follow_symlinks=False)
        if not Path(other).is_symlink():
            sync(Path(other))


def discard(partial: Path) -> None:
    """Remove what was written in vain, as far as that can be done."""
    shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Have what was written to a file or folder on disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def _exchange(one: Path, other: Path) -> bool:
    """Give two paths each other's names in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux; Python has no name for it
    if renameat2 is None:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0
