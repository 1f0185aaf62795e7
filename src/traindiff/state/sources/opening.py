"""What a path holds, found out from its files: `open_checkpoint`."""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import LEADS_OUTSIDE, Folder
from traindiff.core.untrusted.local_files import LocalFiles
from traindiff.errors import CheckpointError
from traindiff.state.sources import (
    adapter_configs,
    deepspeed_files,
    distributed_checkpoints,
    megatron_files,
    safetensors_files,
    torch_files,
)
from traindiff.state.sources.index_files import of_index
from traindiff.state.sources.live import of_object
from traindiff.state.sources.recordings import of_recording
from traindiff.state.stored import Checkpoint, StoredTensor, unreadable
from traindiff.storage.location import file_system, lacks_container

_FILES = (
    "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "adapter_model.bin", "consolidated.safetensors", "consolidated.00.pth",
)  # fmt: skip
"""Files of a directory, in the order in which Hugging Face's libraries look for them."""

_OF_META, _SECOND_OF_META = "consolidated.00.pth", "consolidated.01.pth"
"""What the model-parallel ranks of Meta's Llama have saved."""

_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.\w+)", re.ASCII)
"""How Hugging Face's libraries name the files of a model that is saved in several."""

_POINTER = b"version https://git-lfs"
"""How a file begins that stands for a large one in a clone without Git LFS."""

_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def open_checkpoint(source: Any) -> Checkpoint:
    """What a path, a model or a state dict holds. Headers and pickles are read as data; elements are not read yet.

    Args:
        source: A local path or any fsspec URL of a file or directory, a model, or a state dict.

    Raises:
        CheckpointError: Nothing that can be read is there; the message names file and key.
        ConfigError: The protocol of the URL is not known, or needs a package that is not installed.
        RecordingError: A recording is damaged.
    """
    if not isinstance(source, str | os.PathLike):
        tensors = of_object(source)
        return _checked(Checkpoint(path=type(source).__name__, kind="in memory", tensors=tensors))
    path = os.fspath(source)
    files, root = file_system(path)
    if not files.exists(root):
        if (missing := lacks_container(files, root)) is not None:
            raise CheckpointError(str(missing))
        raise CheckpointError(_not_there(path, files, root))
    is_local = isinstance(files, LocalFiles)
    if is_local and stat.S_ISFIFO(os.stat(root).st_mode):  # noqa: PTH116
        raise CheckpointError(
            f"{path} is a pipe, which is read once and in order; weights are read from several places at once. "
            "Write what it gives into a file, and give that file."
        )
    if files.isdir(root):
        also = _blobs(root) if is_local else []
        return _checked(_of_directory(path, Folder(files, root, refuse=_refused, also=also)))
    directory, name = posixpath.dirname(root) or ".", posixpath.basename(root)
    also = [os.path.realpath(root), *_blobs(directory)] if is_local else []  # the user has named the file
    return _checked(_of_file(path, Folder(files, directory, refuse=_refused, also=also), name))


def _blobs(directory: str) -> list[str]:
    """Where Hugging Face's cache has the files of a snapshot, which are links: `blobs` beside `snapshots`."""
    above = Path(os.path.realpath(directory)).parents
    return [str(one.parent / "blobs") for one in above if one.name == "snapshots"][:1]


def _refused(where: str, what: str) -> CheckpointError:
    """The error for a file that is not read; copying a link again would not help."""
    if what.startswith(LEADS_OUTSIDE):
        return CheckpointError(
            f"{where} is not read: {what}. Copy the file there in place of the link, or give the file's own path."
        )
    return unreadable(where, what)


def _not_there(path: str, files: Any, root: str) -> str:
    """What is said of a path that has nothing: some file systems say so, too, of a server that does not answer."""
    try:
        files.info(root)
    except FileNotFoundError:
        pass
    except Exception as error:  # noqa: BLE001  each of fsspec's file systems has errors of its own
        reason = printable(str(error))[:200] or type(error).__name__
        return f"{path} cannot be reached: {reason}. Give a file or a directory of saved weights."
    return f"{path} does not exist. Give a file or a directory of saved weights."


def _checked(found: Checkpoint) -> Checkpoint:
    if not found.tensors:
        raise CheckpointError(f"{found.path} ({found.kind}) holds no tensors. Give a file or a directory that does.")
    return found


def _of_file(path: str, folder: Folder, name: str) -> Checkpoint:
    if name.endswith(".index.json"):
        return _of_index(path, folder, name)
    start = _start_of(folder, name)
    if name.endswith(".safetensors") or (start[8:9] == b"{" and not name.endswith(_TORCH_ENDINGS)):
        return Checkpoint(path=path, kind="safetensors", tensors=safetensors_files.of_file(folder, name))
    return Checkpoint(path=path, kind="torch.save", tensors=torch_files.of_file(folder, name))


def _of_index(path: str, folder: Folder, name: str) -> Checkpoint:
    read: Callable[[Folder, str], Mapping[str, StoredTensor]] = _read_one
    tensors, notes = of_index(folder, name, read)
    return Checkpoint(path=path, kind=f"files of {name}", tensors=tensors, notes=tuple(notes))


def _read_one(folder: Folder, name: str) -> Mapping[str, StoredTensor]:
    _start_of(folder, name)
    of_file = safetensors_files.of_file if name.endswith(".safetensors") else torch_files.of_file
    return of_file(folder, name)


def _start_of(folder: Folder, name: str) -> bytes:
    """The first bytes of a file.

    Raises:
        CheckpointError: It only points to the file that git would fetch.
    """
    start = folder.read_range(name, 0, len(_POINTER)).tobytes()
    if start == _POINTER:
        raise CheckpointError(
            f"{folder.path(name)} is a pointer of Git LFS, in place of the file. Run git lfs pull where it was cloned."
        )
    return start


def _of_directory(path: str, folder: Folder) -> Checkpoint:
    names = folder.names()
    if "run.json" in names:
        tensors, notes = of_recording(path)
        return Checkpoint(path=path, kind="recording", tensors=tensors, notes=tuple(notes))
    if distributed_checkpoints.METADATA in names:
        tensors, notes = distributed_checkpoints.of_directory(folder)
        return Checkpoint(path=path, kind="torch.distributed.checkpoint", tensors=tensors, notes=tuple(notes))
    of_ranks = _of_ranks(path, folder)
    if of_ranks is not None:
        return of_ranks
    there = [name for name in _FILES if name in names]
    if there[:1] == [_OF_META] and _SECOND_OF_META in names:
        raise CheckpointError(
            f"{path} has several files as {quoted(_OF_META)}, each with a part of most tensors, and how each tensor is "
            "cut is not known. Convert them to one model, e.g. with transformers, or give two of the files."
        )
    if there:
        found = _of_file(path, folder, there[0])
        tensors = {**found.tensors, **_optimizer_beside(folder, names)}
        told = (*found.notes, *_not_read(path, there[:1], there[1:]))
        return replace(found, tensors=tensors, notes=told, adapter_scale=adapter_configs.scale_beside(folder))
    of_torch = [name for name in names if name.endswith(_TORCH_ENDINGS)]
    files = [name for name in names if name.endswith(".safetensors")]
    if files and of_torch:
        return replace(_of_files(path, folder, files), notes=tuple(_not_read(path, files, of_torch)))
    files = files or of_torch
    if not files:
        shown = ", ".join(quoted(name) for name in names[:5]) or "nothing"
        raise CheckpointError(
            f"{path} is no directory of saved weights: it holds {shown}. Give a file, or a directory with "
            "model.safetensors, an index, .metadata (torch.distributed.checkpoint) or run.json (a recording)."
        )
    return _of_files(path, folder, files)


def _not_read(path: str, read: Sequence[str], others: Sequence[str]) -> list[str]:
    """A note on files of a directory that may hold the same model again, or another one; none if there are none."""
    if not others:
        return []
    first, other = quoted(read[0]), quoted(others[0])
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [f"{path} has {other}{more} beside {first}, which is what was read. Give a file to compare another one."]


def _optimizer_beside(folder: Folder, names: Collection[str]) -> dict[str, StoredTensor]:
    """What the optimizer keeps, in the file that transformers' Trainer and Accelerate write beside the model.

    Raises:
        CheckpointError: The file is damaged, or would run code.
    """
    name = next((name for name in ("optimizer.pt", "optimizer.bin") if name in names), None)
    if name is None:
        return {}
    archive = torch_files.archive_of(folder, name)
    return torch_files.named_tensors({"optimizer": archive.value}, archive.where, archive.tensor)


def _of_ranks(path: str, folder: Folder) -> Checkpoint | None:
    """What DeepSpeed or Megatron has written, in files of each rank or below the directory of a step; None if neither.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    deepspeed = deepspeed_files.directory_of(folder)
    if deepspeed is not None:
        tensors, notes = deepspeed_files.of_directory(deepspeed)
        return Checkpoint(path=path, kind="DeepSpeed", tensors=tensors, notes=tuple(notes))
    if megatron_files.is_of_ranks(folder):
        tensors, notes = megatron_files.of_directory(folder)
        return Checkpoint(path=path, kind="Megatron", tensors=tensors, notes=tuple(notes))
    latest = megatron_files.latest_of(folder)
    return None if latest is None else _of_directory(path, latest)


def _of_files(path: str, folder: Folder, files: list[str]) -> Checkpoint:
    """Files without an index, each with tensors of its own.

    Raises:
        CheckpointError: A file is missing, or two have a tensor of one name.
    """
    _check_all_shards(folder, files)
    found: dict[str, StoredTensor] = {}
    holder: dict[str, str] = {}
    for name in files:
        for key, tensor in _read_one(folder, name).items():
            if key in found:
                raise unreadable(
                    folder.path(name),
                    f"{quoted(key)} is in {quoted(holder[key])}, too, and no index says which of them counts",
                )
            found[key], holder[key] = tensor, name
    return Checkpoint(path=path, kind=f"{len(files)} files" if len(files) > 1 else files[0], tensors=found)


def _check_all_shards(folder: Folder, files: Sequence[str]) -> None:
    """Refuse files whose names say that there are more of them.

    Raises:
        CheckpointError: They do.
    """
    there = {*files}
    for match in filter(None, map(_SHARD.fullmatch, files)):
        others = (f"{match[1]}{number:05}-of-{match[3]}{match[4]}" for number in range(1, int(match[3]) + 1))
        missing = next((name for name in others if name not in there), None)
        if missing is not None:
            raise unreadable(folder.root, f"{quoted(missing)} is missing, which belongs to {quoted(match[0])}")
