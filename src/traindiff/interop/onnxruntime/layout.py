"""Where `StatisticsSubscriber` puts its files.

{directory}/step_{step}/order.txt       names of the files below, in the order in which they were written
{directory}/step_{step}/{name}_{forward|backward}

Of several ranks each has a directory of its own, {directory}/rank_{rank}, which ONNX Runtime lacks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from traindiff.errors import NotARecordingError
from traindiff.interop.onnxruntime.statistics import Direction
from traindiff.recording.names import file_name
from traindiff.untrusted import Folder

ORDER = "order.txt"

_STEP = re.compile(r"step_(\d{1,18})", re.ASCII)
_RANK = re.compile(r"rank_(\d{1,5})", re.ASCII)

MOST_BYTES = 1 << 22
"""Size of a file at most: one of a tensor has 128 elements, and `order.txt` a line for each tensor."""
_LONGEST_NAME = 255
"""Bytes of the name of a file; longer ones are no names on any usual file system."""

_CALL = re.compile(r"(?P<name>.*)_call_(?P<call>\d{1,9})", re.ASCII)


def rank_directory(directory: Path, rank: int, world_size: int) -> Path:
    """Where the files of a rank are."""
    return directory if world_size == 1 else directory / f"rank_{rank}"


def step_directory(directory: Path, step: int) -> Path:
    """Where the files of a step are, in the directory of a rank."""
    return directory / f"step_{step}"


def called(name: str, call: int) -> str:
    """The name of what has a name that it is not the first to have in its step."""
    return f"{name}_call_{call}" if call else name


def call_of(name: str) -> tuple[str, int]:
    """A name without the number that `called` has given it, and that number."""
    match = _CALL.fullmatch(name)
    return (match["name"], int(match["call"])) if match else (name, 0)


def statistics_file(name: str, direction: Direction) -> str:
    """The name of a file: as ONNX Runtime has it, if that is a file name on every system."""
    return file_name(f"{name}_{direction}")


def order_of(step: Path) -> list[str]:
    """Names of the files of a step in the order in which they were written, each once.

    Args:
        step: Its directory.

    Raises:
        NotARecordingError: Nothing says so, or what does names something else than files of the step.
    """
    path = step / ORDER
    if not os.path.lexists(path):
        raise NotARecordingError(f"{step} has no {ORDER}, which names its files. Restore it from where it was.")
    names = list(dict.fromkeys(text_of(step, ORDER).splitlines()))
    if wrong := [name for name in names if not _is_name(name)]:
        raise NotARecordingError(
            f"{path} names {wrong[0]!r}, which is no file of ONNX Runtime's StatisticsSubscriber. "
            "Give the directory that its output_dir named, as it was written."
        )
    return names


def text_of(step: Path, name: str) -> str:
    """The text of a file of a step.

    Args:
        step: Its directory.
        name: The file.

    Raises:
        NotARecordingError: It is no regular file inside of the directory, or too large.
    """
    return Folder.of(step, refuse=_damaged).read(name, limit=MOST_BYTES).decode(errors="replace")


def _damaged(where: str, what: str) -> NotARecordingError:
    return NotARecordingError(
        f"{where} is not of ONNX Runtime's StatisticsSubscriber: {what}. Restore it from where it was copied."
    )


def _is_name(name: str) -> bool:
    return name != ".." and Path(name).name == name and len(os.fsencode(name)) <= _LONGEST_NAME


def steps_in(directory: Path) -> dict[int, Path]:
    """Directories of steps by number, ascending."""
    return _numbered(directory, _STEP)


def ranks_in(directory: Path) -> dict[int, Path]:
    """Directories of ranks by number, ascending; rank 0 is the directory itself where there is one rank."""
    return {0: directory} if steps_in(directory) else _numbered(directory, _RANK)


def _numbered(directory: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    if not directory.is_dir():
        return {}
    folder, found = Folder.of(directory, refuse=_damaged), {}
    for one in directory.iterdir():
        if match := pattern.fullmatch(one.name):
            folder.within(one.name)
            if os.path.isdir(one):  # noqa: PTH112  which never raises
                found[int(match[1])] = one
    return dict(sorted(found.items()))
