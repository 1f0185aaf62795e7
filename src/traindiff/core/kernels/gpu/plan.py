"""Plans that divide a shard among the programs of a launch; computed on the host from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from traindiff.core.kernels.parts import Runs, runs
from traindiff.core.shards import BUCKETS, Shard

ELEMENTS_PER_PART = 8192
"""Elements per program, about. A tensor that is not larger needs no merging."""

MOST_PARTS = 1024
"""Programs for one tensor, at most: enough to fill a large GPU, 1.1 MB of summaries to merge."""

TILE_LOG2 = 10
"""Log2 of the elements of a tile of `blocks.summarize_profiles`."""


class KernelPiece(NamedTuple):
    """Equally spaced runs of a tensor, as the kernel's arguments; elements are counted, not bytes.

    Run r holds `length` elements, `memory_step * r` after the piece's first in memory, and with the
    global indices from `start + index_step * r`.

    For the profiles the global index is cut into *lines* of `line_length`: rows, or, where a row is
    no longer than a column bucket, all rows of a row bucket. Line l lies in the row bucket
    `(l // line_block) % 16`.

    Attributes:
        length: Elements in each run.
        num_runs: Number of runs.
        memory_step: From one run to the next, in memory.
        index_step: The same, in global indices.
        start: Global index of the first element.
        blocks_per_run: Blocks of 64 that a run can touch.
        line_length: Elements of a line.
        line_block: Lines of a row bucket that follow each other.
        column_block: Columns of a column bucket.
        first_group: First line, in units of `line_block`.
        first_line: Where the first row bucket begins.
        row_buckets: Number of row buckets that the piece may touch.
        column_buckets: Number of column buckets that it may touch.
        lines: Lines of a row bucket that follow each other and may be touched, at most `line_block`.
        periods: How often that many follow; between them lie the other row buckets.
        first_column: First column that it may touch.
        stop_column: The column after the last that it may touch.
        window: Columns of each column bucket that lie between the two, at most.
        width_log2: Of the columns of a tile.
        height_log2: Of its lines that follow each other; its other lines are those of further periods.
        splits: How many programs share a row and a column bucket.
    """

    length: int
    num_runs: int
    memory_step: int
    index_step: int
    start: int
    blocks_per_run: int
    line_length: int
    line_block: int
    column_block: int
    first_group: int
    first_line: int
    row_buckets: int
    column_buckets: int
    lines: int
    periods: int
    first_column: int
    stop_column: int
    window: int
    width_log2: int
    height_log2: int
    splits: int


class Planned(NamedTuple):
    """A piece, and how it is launched.

    Attributes:
        piece: The arguments.
        offset: Its first element, in elements after the tensor's.
        parts: Number of programs.
    """

    piece: KernelPiece
    offset: int
    parts: int

    @property
    def box(self) -> bool:
        """True if the piece has several runs, which costs the kernel divisions."""
        return self.piece.num_runs > 1


@lru_cache(maxsize=8192)
def plan(shard: Shard, strides: tuple[int, ...], elements_per_part: int = ELEMENTS_PER_PART) -> tuple[Planned, ...]:
    """The pieces of a tensor: one, but for boxes cut along three axes or more, and short ranges of long rows.

    Args:
        shard: Which elements it holds.
        strides: Its strides, one per axis of `shard.shape`.
        elements_per_part: Elements per program, about.
    """
    if not shard.size:
        nothing = Runs(memory=0, index=0, count=1, length=0, memory_step=0, index_step=1)
        return (_planned(shard, nothing, elements_per_part),)
    found = (piece for part in runs(*shard.axes(strides)) for piece in _within_lines(part, shard))
    return tuple(_planned(shard, part, elements_per_part) for part in found)


def _within_lines(part: Runs, shard: Shard) -> Iterator[Runs]:
    """The end of one long line and the beginning of the next, apart: together they seem to touch all columns."""
    start, columns = shard.start + part.index, shard.grid.columns
    first = columns - start % columns
    if part.count > 1 or not first < part.length <= columns // 4:
        yield part
        return
    yield replace(part, length=first)
    yield replace(part, memory=part.memory + first, index=part.index + first, length=part.length - first)


def _planned(shard: Shard, part: Runs, elements_per_part: int) -> Planned:
    grid = shard.grid
    start = shard.start + part.index
    index_step = part.index_step if part.count > 1 else max(1, part.length)
    last = start + max(0, (part.count - 1) * index_step + part.length - 1)
    line_length, line_block, column_block = grid.columns, grid.row_block, grid.column_block
    if line_length <= column_block:  # one column bucket: all rows of a row bucket are one line
        line_length *= line_block
        line_block, column_block = 1, line_length
    first_line, last_line = start // line_length, last // line_length
    first_group, last_group = first_line // line_block, last_line // line_block
    lines, periods = last_line - first_line + 1, 1
    if first_group != last_group:
        lines, periods = line_block, -(-(last_group - first_group + 1) // BUCKETS)
        first_line = first_group * line_block
    row_buckets = min(BUCKETS, last_group - first_group + 1)
    first_column, last_column = _columns(start, last, part, line_length)
    column_buckets = last_column // column_block - first_column // column_block + 1
    window = column_block
    if column_buckets <= 2:
        ahead = min(last_column + 1, column_block * (first_column // column_block + 1)) - first_column
        window = max(ahead, last_column + 1 - first_column - ahead)
    parts = max(1, min(MOST_PARTS, -(-part.length * part.count // elements_per_part)))
    steps, width_log2, height_log2 = _tiles(window, lines, periods)
    piece = KernelPiece(
        length=part.length,
        num_runs=part.count,
        memory_step=part.memory_step,
        index_step=index_step,
        start=start,
        blocks_per_run=-(-(start % 64 + part.length) // 64) if part.count == 1 else (part.length + 62) // 64 + 1,
        line_length=line_length,
        line_block=line_block,
        column_block=column_block,
        first_group=first_group,
        first_line=first_line,
        row_buckets=row_buckets,
        column_buckets=column_buckets,
        lines=lines,
        periods=periods,
        first_column=first_column,
        stop_column=last_column + 1,
        window=window,
        width_log2=width_log2,
        height_log2=height_log2,
        splits=max(1, min(steps, -(-parts // (row_buckets * column_buckets)))),
    )
    return Planned(piece=piece, offset=part.memory, parts=parts)


def _columns(start: int, last: int, part: Runs, line_length: int) -> tuple[int, int]:
    """First and last column that the runs may touch."""
    first_column = start % line_length
    if start // line_length == last // line_length:
        return first_column, last % line_length
    if part.count > 1 and part.index_step % line_length == 0 and first_column + part.length <= line_length:
        return first_column, first_column + part.length - 1
    return 0, line_length - 1


def _tiles(columns: int, lines: int, periods: int) -> tuple[int, int, int]:
    """How few tiles cover so many columns and lines; log2 of the width and height of such a tile, the widest."""
    best = (2**62, 0, 0)
    for width in range(TILE_LOG2, -1, -1):
        for height in range(TILE_LOG2 - width, -1, -1):
            depth = TILE_LOG2 - width - height
            tiles = (-columns >> width) * (-lines >> height) * -(-periods >> depth)
            if tiles < best[0]:
                best = (tiles, width, height)
    return best
