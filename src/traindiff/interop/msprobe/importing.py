"""From the files of msprobe's gradient monitor to a recording."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.detail import Detail, RawTensor
from traindiff.errors import NotARecordingError
from traindiff.interop.imported import rank_writer, run_content
from traindiff.interop.msprobe import tables
from traindiff.interop.msprobe.layout import (
    content,
    damaged,
    direction_file,
    direction_steps_in,
    ranks_in,
    summaries_in,
)
from traindiff.interop.msprobe.tables import Row, Table
from traindiff.observation import Observation
from traindiff.recording import RecordingWriter
from traindiff.shards import Shard
from traindiff.site import canonical_paths
from traindiff.summary import empty
from traindiff.untrusted.numpy_file import MOST_HEADER_BYTES, booleans

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
    root = Path(directory)
    every = ranks_in(root) if root.is_dir() else {}
    ranks = {rank: path for rank, path in every.items() if summaries_in(path)}
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
    world_size = max(ranks) + 1
    _, first = next(_tables(next(iter(ranks.values()))))
    detail = ["summary", "signs"] if any(direction_steps_in(path) for path in ranks.values()) else ["summary"]
    run = _run(list(ranks), world_size, detail=detail, bounds=first.columns.bounds or (), source=directory)
    count = 0
    for rank, path in ranks.items():
        with rank_writer(recording, run=run, rank=rank, world_size=world_size, overwrite=overwrite) as writer:
            count += _write_rank(writer, path, world_size)
    return count


def _tables(rank: Path) -> Iterator[tuple[int, Table]]:
    for step, path in summaries_in(rank).items():
        yield step, tables.load(content(rank, path), where=str(path))


def _run(
    ranks: Sequence[int], world_size: int, *, detail: Sequence[str], bounds: Sequence[float], source: str
) -> dict[str, Any]:
    settings = {
        "observe": ["grad"],
        "detail": list(detail),
        "bounds": list(bounds),
        "ranks": None if len(ranks) == world_size else list(ranks),
    }
    return run_content(world_size, settings=settings, command=["traindiff", "import", "msprobe", source])


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
    writer.write_rank(
        {
            "model": "", "modules": {}, "parameters": parameters, "buffers": {}, "tied": {},
            "optimizers": [{"name": "optimizer", "type": "", "groups": [list(parameters)]}],
            "world_size": world_size, "mesh": None,
        }
    )  # fmt: skip
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
            says = f"it has directions of shape {list(directions.shape)}; its row says {list(row.shape)}"
            raise damaged(found, says)
        bits = np.packbits(directions.reshape(-1), bitorder="little")
        kept["positive"] = RawTensor(dtype="uint8", shape=bits.shape, data=bits.tobytes())
    if table.columns.bounds:
        size = int(np.prod(row.shape, dtype=np.int64))
        counts = np.array([round(share * size) for share in row.shares[:-1]], dtype="<i8")
        kept["intervals"] = RawTensor(dtype="int64", shape=counts.shape, data=counts.tobytes())
    return kept


def read_directions(rank: Path, path: Path, *, size: int | None = None) -> NDArray[np.bool_]:
    """The directions of a gradient, in its shape.

    Args:
        rank: The directory of the rank.
        path: The file.
        size: How many elements it must have; None for as many as it has.

    Raises:
        NotARecordingError: The file holds something else.
    """
    limit = MOST_DIRECTIONS_BYTES if size is None else size + MOST_HEADER_BYTES
    try:
        return booleans(content(rank, path, limit=limit))
    except ValueError as error:
        raise damaged(path, f"it {error}") from None
