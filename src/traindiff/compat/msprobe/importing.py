"""From the files of msprobe's gradient monitor to a recording."""

from __future__ import annotations

import ast
import os
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.compat.imported import import_ranks, rank_content
from traindiff.compat.msprobe import tables
from traindiff.compat.msprobe.layout import content, damaged, direction_file, direction_steps_in, ranks_in, summaries_in
from traindiff.compat.msprobe.tables import Row, Table
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.site import canonical_paths
from traindiff.core.summary import Detail, RawTensor, empty
from traindiff.errors import NotARecordingError
from traindiff.storage import RecordingWriter

_MAGIC = b"\x93NUMPY"
MOST_HEADER_BYTES = 1 << 12
"""Size of a header at most, with what lies before it."""
_MOST_AXES = 64
_BOOL = "|b1"


def booleans(data: bytes) -> NDArray[np.bool_]:
    """The array in the content of a `.npy` file.

    Raises:
        ValueError: It is not a whole file of booleans; the message is a clause that says why.
    """
    if data[:6] != _MAGIC or len(data) < 12 or data[6] not in (1, 2, 3):
        raise ValueError("cannot be read as an array")
    form, begin = ("<H", 10) if data[6] == 1 else ("<I", 12)
    (length,) = struct.unpack_from(form, data, 8)
    if length > MOST_HEADER_BYTES - begin or begin + length > len(data):
        raise ValueError(f"has a header of {length} bytes")
    kind, by_column, shape = _header(data[begin : begin + length])
    if kind != _BOOL:
        raise ValueError(f"holds {kind!r} and not bool")
    content = memoryview(data)[begin + length :]
    if prod(shape) != len(content):
        raise ValueError(f"has the shape {list(shape)}, and {len(content)} elements")
    return np.frombuffer(content, dtype=np.uint8).astype(np.bool_).reshape(shape, order="F" if by_column else "C")


def _header(data: bytes) -> tuple[str, bool, tuple[int, ...]]:
    try:
        header = ast.literal_eval(data.decode("latin-1").strip())
        kind, by_column, shape = header["descr"], header["fortran_order"], header["shape"]
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError, KeyError):
        raise ValueError("cannot be read as an array") from None
    lengths_are_known = isinstance(shape, tuple) and len(shape) <= _MOST_AXES
    if not lengths_are_known or not all(type(one) is int and 0 <= one < 2**62 for one in shape):
        raise ValueError("has no shape")
    return str(kind)[:80], bool(by_column), shape


KEPT_NO_MORE = "msprobe keeps no more of it than its directions, extremes and norm"
"""Why there are no summaries."""

MOST_RANKS = 1 << 16
"""A single directory with a larger number is of a process id, which MindSpore gives where there is one rank."""


MOST_DIRECTIONS_BYTES = 1 << 30
"""Size at most of a file of directions, one byte each, where nothing says how many there are."""


def import_gradients(directory: str, recording: str, *, overwrite: bool = False) -> int:
    """Make a recording of what msprobe's gradient monitor has written.

    Directions, extremes and norms are in it; the summaries that `traindiff.compare` measures with are not, so of two
    runs of which one was imported, it compares directions alone. Paths are canonical: `module.fc.weight` becomes
    `fc.weight`. What msprobe calls MD5 is CRC32 and is left out.

    Args:
        directory: The `dump_path` of the monitor.
        recording: The recording to make: a local path or any fsspec URL.
        overwrite: Replace a recording that is there.

    Returns:
        How many gradients were read.

    Raises:
        ConfigError: `recording` is taken.
        NotARecordingError: `directory` holds no such files, or one that cannot be read.
    """
    ranks = {rank: path for rank, path in ranks_in(Path(directory)).items() if summaries_in(path)}
    if not ranks:
        raise NotARecordingError(
            f"{directory} holds no rank0/grad_summary_0.csv or the like, so msprobe's gradient monitor has not written "
            "it. Give the directory that its dump_path named."
        )
    if len(ranks) == 1 and max(ranks) >= MOST_RANKS:
        ranks = {0: next(iter(ranks.values()))}
    if max(ranks) >= MOST_RANKS:
        raise NotARecordingError(
            f"{directory} holds rank{max(ranks)} beside others, and no training has so many ranks. Move what is of "
            "another run to a directory of its own."
        )
    _, first = next(_tables(next(iter(ranks.values()))))
    detail = ["summary", "signs"] if any(direction_steps_in(path) for path in ranks.values()) else ["summary"]
    settings = {"observe": ["grad"], "detail": detail, "bounds": list(first.columns.bounds or ())}
    command = ["traindiff", "import", "msprobe", directory]
    return import_ranks(recording, ranks, _write_rank, settings=settings, command=command, overwrite=overwrite)


def _tables(rank: Path) -> Iterator[tuple[int, Table]]:
    for step, path in summaries_in(rank).items():
        yield step, tables.load(content(rank, path), where=str(path))


def _write_rank(writer: RecordingWriter, rank: Path, world_size: int) -> int:
    shapes: dict[str, tuple[int, ...]] = {}
    count = 0
    for step, table in _tables(rank):
        seen, summaries, details = [], [], {}
        paths = canonical_paths([row.name for row in table.rows])
        for number, row in enumerate(table.rows):
            path = paths.get(row.name, row.name)
            shapes[path] = row.shape
            seen.append(
                Observation(
                    step=step, micro_step=0, optimizer="optimizer", phase="grad", stage="", path=path, slot="grad",
                    call=0, order=number, dtype="", shard=Shard.whole(row.shape), unobserved=KEPT_NO_MORE,
                )
            )  # fmt: skip
            summaries.append(_summary(row))
            if kept := _detail(rank, step, row, table):
                details[number] = Detail(tensors=kept)
        if seen:
            writer.write_step(seen, np.array(summaries), details)
        count += len(seen)
    parameters = {path: {"shape": list(shape), "dtype": "", "requires_grad": True} for path, shape in shapes.items()}
    optimizers = [{"name": "optimizer", "type": "", "groups": [list(parameters)]}]
    writer.write_rank(rank_content(world_size, parameters=parameters, optimizers=optimizers))
    return count


def _summary(row: Row) -> Any:
    """What is known of the numbers."""
    summary = empty()
    summary["count"] = np.prod(row.shape, dtype=np.int64)
    summary["maximum"], summary["minimum"] = row.maximum, row.minimum
    with np.errstate(over="ignore"):
        summary["sum_of_squares"] = np.float64(row.norm) ** 2
    if row.shares:
        summary["zero"] = round(row.shares[-1] * int(summary["count"]))
    return summary


def _detail(rank: Path, step: int, row: Row, table: Table) -> dict[str, RawTensor]:
    kept = {}
    if os.path.lexists(found := direction_file(rank, step, row.name)):
        directions = read_directions(rank, found, size=prod(row.shape))
        if directions.shape != row.shape:
            message = f"it has directions of shape {list(directions.shape)}; its row says {list(row.shape)}"
            raise damaged(found, message)
        bits = np.packbits(directions.reshape(-1), bitorder="little")
        kept["positive"] = RawTensor(dtype="uint8", shape=bits.shape, data=bits.tobytes())
    if table.columns.bounds:
        size = int(np.prod(row.shape, dtype=np.int64))
        counts = np.array([round(share * size) for share in row.shares[:-1]], dtype="<i8")
        kept["intervals"] = RawTensor(dtype="int64", shape=counts.shape, data=counts.tobytes())
    return kept


def read_directions(rank: Path, path: Path, *, size: int | None = None) -> NDArray[np.bool_]:
    """The directions of a gradient, with the shape of the gradient.

    Args:
        rank: The directory of the rank.
        path: The file.
        size: Required number of elements; None accepts any number.

    Raises:
        NotARecordingError: The file holds something else.
    """
    limit = MOST_DIRECTIONS_BYTES if size is None else size + MOST_HEADER_BYTES
    try:
        return booleans(content(rank, path, limit=limit))
    except ValueError as error:
        raise damaged(path, f"it {error}") from None
