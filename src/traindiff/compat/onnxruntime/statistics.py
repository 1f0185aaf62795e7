"""The file of one activation, or of its gradient, as `StatisticsSubscriber` of ONNX Runtime 1.19 writes it.

{directory}/step_{step}/order.txt       names of the files below, in the order in which they were written
{directory}/step_{step}/{name}_{forward|backward}

Of several ranks each has a directory of its own, {directory}/rank_{rank}, which ONNX Runtime lacks.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from traindiff.compat.imported import numbered
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import NotARecordingError
from traindiff.storage.location import file_name
from traindiff.storage.schema import MOST_AXES

Direction = Literal["forward", "backward"]

NUM_SAMPLES = 128
"""First elements that a file has."""

_HEAD = re.compile(
    r"(?P<depth>>*+)(?P<name>.*) (?P<direction>forward|backward) run shape: torch\.Size\(\[(?P<shape>[\d, ]*)\]\) "
    r"dtype: torch\.(?P<dtype>\w+) size: torch\.Size\(\[(?P<size>\d+)\]\) "
)
_NUMBER = r"(\S+?)"
_SIZES = re.compile(rf"min: {_NUMBER} max: {_NUMBER}, mean: {_NUMBER}, std: {_NUMBER} ")
_NOT_FINITE = re.compile(r"nan: (\d+), inf: (\d+)")
_SIGNS = re.compile(r"neg: (\d+), pos: (\d+), zero: (\d+),")
_MOST = 1 << 60
"""Elements that a tensor may have."""

_SAMPLES = f"samples(top {NUM_SAMPLES}): "
_END = "=" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The numbers of a tensor in a file.

    Attributes:
        name: `Linear_1_0th_output`, or as the user called it.
        direction: Whether it is the activation, or its gradient.
        depth: Of the module, 1 for the root; -1 or 0 for what no module returned.
        shape: Of the tensor.
        dtype: As torch spells it, without its prefix.
        minimum: Smallest element; NaN if one is NaN, or if there is none.
        maximum: Largest element.
        mean: Of all elements.
        std: Sample standard deviation, of n - 1.
        num_nan: Elements that are NaN.
        num_infinite: Elements that are infinite.
        num_negative: Elements below zero.
        num_positive: Elements above zero.
        num_zero: Elements that are zero.
        samples: The first 128 elements as torch prints them, `tensor([...])`.
    """

    name: str
    direction: Direction
    depth: int
    shape: tuple[int, ...]
    dtype: str
    minimum: float
    maximum: float
    mean: float
    std: float
    num_nan: int
    num_infinite: int
    num_negative: int
    num_positive: int
    num_zero: int
    samples: str

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        return self.num_nan + self.num_negative + self.num_positive + self.num_zero

    def values(self) -> list[float]:
        """The first 128 elements, to the six digits after the point that are printed."""
        inside = self.samples.partition("[")[2].rpartition("]")[0]
        return [_as_float(one) for one in inside.replace("\n", " ").split(",") if one.strip()]


def dump(found: Statistics) -> str:
    """The text of a file."""
    shape = ", ".join(map(str, found.shape))
    return (
        f"{'>' * max(0, found.depth)}{found.name} {found.direction} run shape: torch.Size([{shape}]) "
        f"dtype: torch.{found.dtype} size: torch.Size([{found.count}]) \n"
        f"min: {found.minimum} max: {found.maximum}, mean: {found.mean}, std: {found.std} \n"
        f"nan: {found.num_nan}, inf: {found.num_infinite}\n"
        f"{_SAMPLES}{found.samples}\n"
        f"neg: {found.num_negative}, pos: {found.num_positive}, zero: {found.num_zero},\n"
        f"{_END}\n"
    )


def load(text: str, *, where: str) -> Statistics:
    """Read what `dump`, or ONNX Runtime, wrote.

    Raises:
        NotARecordingError: It is something else.
    """
    lines = text.split("\n")
    head = _HEAD.fullmatch(lines[0])
    sizes = _SIZES.fullmatch(lines[1]) if len(lines) > 1 else None
    odd = _NOT_FINITE.fullmatch(lines[2]) if len(lines) > 2 else None
    signs = next(((at, match) for at, line in enumerate(lines) if (match := _SIGNS.fullmatch(line))), None)
    if not (head and sizes and odd and signs and text.rstrip("\n").endswith(_END)):
        raise NotARecordingError(
            f"{where} is no file of ONNX Runtime's StatisticsSubscriber, or it was cut off. "
            "Give the directory that its output_dir named, as it was written."
        )
    at, counts = signs
    samples = "\n".join(lines[3:at]).removeprefix(_SAMPLES)
    try:
        minimum, maximum, mean, std = map(_as_float, sizes.groups())
        found = Statistics(
            name=head["name"],
            direction="forward" if head["direction"] == "forward" else "backward",
            depth=len(head["depth"]),
            shape=tuple(int(length) for length in head["shape"].split(",") if length.strip()),
            dtype=head["dtype"],
            minimum=minimum, maximum=maximum, mean=mean, std=std,
            num_nan=int(odd[1]), num_infinite=int(odd[2]),
            num_negative=int(counts[1]), num_positive=int(counts[2]), num_zero=int(counts[3]),
            samples=samples,
        )  # fmt: skip
        found.values()
        _check_counts(found)
    except ValueError as error:
        raise NotARecordingError(
            f"{where} is no file of ONNX Runtime's StatisticsSubscriber: {error}. "
            "Give the directory that its output_dir named, as it was written."
        ) from None
    return found


def _check_counts(found: Statistics) -> None:
    size = math.prod(max(1, length) for length in found.shape)
    if max(found.count, found.num_infinite, size) > _MOST or len(found.shape) > MOST_AXES:
        raise ValueError("it counts more elements than there can be")
    parts = 2 if "complex" in found.dtype else 1  # a complex number counts as two
    if found.count != (expected := parts * math.prod(found.shape)):
        raise ValueError(f"it counts {found.count} elements, and a tensor of shape {list(found.shape)} has {expected}")


def _as_float(text: str) -> float:
    """A number as torch prints it; booleans are 0 and 1."""
    text = text.strip()
    return float({"True": "1", "False": "0"}.get(text, text))


ORDER = "order.txt"

_STEP = re.compile(r"step_(\d{1,18})", re.ASCII)
_RANK = re.compile(r"rank_(\d{1,5})", re.ASCII)

MOST_BYTES = 1 << 22
"""Size of a file at most: one of a tensor has 128 elements, and `order.txt` a line for each tensor."""
_LONGEST_NAME = 255
"""Bytes of the name of a file; longer ones are no names on any usual file system."""

_CALL = re.compile(r"(?P<name>.*)_call_(?P<call>\d{1,9})", re.ASCII)


def rank_directory(directory: Path, rank: int, world_size: int) -> Path:
    """The directory of the files of a rank."""
    return directory if world_size == 1 else directory / f"rank_{rank}"


def step_directory(directory: Path, step: int) -> Path:
    """The directory of the files of a step, inside the directory of a rank."""
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
    """Names of the files of a step, whose directory it is, in the order in which they were written, each once.

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
    """The text of a file in the directory of a step.

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
    return numbered(directory, _STEP, kind=os.path.isdir, refuse=_damaged)


def ranks_in(directory: Path) -> dict[int, Path]:
    """Directories of ranks by number, ascending; rank 0 is the directory itself where there is one rank."""
    return {0: directory} if steps_in(directory) else numbered(directory, _RANK, kind=os.path.isdir, refuse=_damaged)
