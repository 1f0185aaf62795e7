"""From the files of ONNX Runtime's `StatisticsSubscriber` to a recording."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from traindiff.compat.imported import import_ranks, rank_content
from traindiff.compat.onnxruntime.statistics import (
    NUM_SAMPLES,
    ORDER,
    Statistics,
    call_of,
    load,
    order_of,
    ranks_in,
    steps_in,
    text_of,
)
from traindiff.core.kernels.reference import summarize_array
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.site import printable
from traindiff.core.summary import empty
from traindiff.errors import NotARecordingError
from traindiff.storage import RecordingWriter

KEPT_NO_MORE = f"ONNX Runtime keeps no more of it than extremes, moments, counts and its first {NUM_SAMPLES} elements"
"""Why there are no summaries of whole tensors."""

SETTINGS = {"observe": ["forward", "backward"]}
"""Settings of a recording of activations alone."""

DTYPE_OF_SAMPLES = "bfloat16"
"""How exact the printed elements are taken to be.

They have six digits after the point. torch prints so where no element but zero is below 1e-4, and with an exponent
elsewhere: the error is 5e-7 of 1e-4 at most, half a per cent. The rounding of bfloat16 (0.8 %) is more.
"""

_OUTPUT = re.compile(r"(?P<module>\w+)_(?P<number>\d+)th_output", re.ASCII)

Row = tuple[Observation, Any]


def import_statistics(directory: str, recording: str, *, overwrite: bool = False) -> int:
    """Make a recording of what `StatisticsSubscriber` of ONNX Runtime has written.

    Of each tensor it has two sites: the tensor itself, of which extremes, moments and counts are known and which
    `traindiff.compare` therefore takes for unknown; and its first 128 elements, of which it compares what is printed.
    Paths are as the files have them (`Linear_1`): class and number.

    Args:
        directory: The `output_dir` of the subscriber.
        recording: The recording to make: a local path or any fsspec URL.
        overwrite: Replace a recording that is there.

    Returns:
        How many tensors were read.

    Raises:
        ConfigError: `recording` is taken.
        NotARecordingError: `directory` holds no such files, or one that cannot be read.
    """
    ranks = {rank: path for rank, path in ranks_in(Path(directory)).items() if steps_in(path)}
    if not ranks:
        raise NotARecordingError(
            f"{directory} holds no step_0/{ORDER} or the like, so ONNX Runtime's StatisticsSubscriber has not written "
            "it. Give the directory that its output_dir named."
        )
    command = ["traindiff", "import", "onnxruntime", directory]
    return import_ranks(recording, ranks, _write_rank, settings=SETTINGS, command=command, overwrite=overwrite)


def _write_rank(writer: RecordingWriter, rank: Path, world_size: int) -> int:
    modules: dict[str, str] = {}
    count = 0
    for step, directory in steps_in(rank).items():
        rows: list[Row] = []
        for found in _statistics(directory):
            rows += _rows(found, step=step, order=len(rows))
            count += 1
        if rows:
            writer.write_step([seen for seen, _ in rows], np.array([summary for _, summary in rows]))
        modules |= {seen.path: seen.path.rpartition("_")[0] for seen, _ in rows}
    writer.write_rank(rank_content(world_size, model=modules.get("", ""), modules=modules))
    return count


def _statistics(directory: Path) -> Iterator[Statistics]:
    """The files of a step, in the order in which they were written."""
    for name in order_of(directory):
        path = directory / name
        if not os.path.lexists(path):
            raise NotARecordingError(
                f"{printable(str(path))} is not there, and {ORDER} names it. Restore it from where it was copied."
            )
        yield load(text_of(directory, name), where=str(path))


def _rows(found: Statistics, *, step: int, order: int) -> list[Row]:
    """The tensor of a file, and its first elements."""
    name, call = call_of(found.name)
    match = _OUTPUT.fullmatch(name)
    path, slot = (match["module"], f"output[{match['number']}]") if match else (name, "value")
    with np.errstate(over="ignore"):
        values = np.array(found.values()).astype(np.float32)
    shape = Shard.whole(values.shape)

    def seen(number: int, **about: Any) -> Observation:
        return Observation(
            step=step, micro_step=0, optimizer="optimizer", phase=found.direction, stage="", path=path, call=call,
            order=order + number, **about,
        )  # fmt: skip

    whole = seen(0, slot=slot, dtype=found.dtype, shard=Shard.whole(found.shape), unobserved=KEPT_NO_MORE)
    first = seen(1, slot=f"{slot}[:{NUM_SAMPLES}]", dtype=DTYPE_OF_SAMPLES, shard=shape)
    tiny = float(np.finfo(np.float32).smallest_normal)
    return [(whole, _known(found)), (first, summarize_array(values, values.view(np.uint32), shape, tiny=tiny))]


def _known(found: Statistics) -> Any:
    """What is known of the numbers of a tensor."""
    summary = empty()
    count, finite = found.count, found.count - found.num_nan - found.num_infinite
    summary["count"], summary["nan"] = count, found.num_nan
    summary["negative"], summary["zero"] = found.num_negative, found.num_zero
    summary["minimum"], summary["maximum"] = found.minimum, found.maximum
    if finite == count and count:
        summary["sum"] = found.mean * count  # the original's standard deviations are wrong
    return summary
