"""What a configuration says of a recording, and of the files behind it; the same under every framework."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from traindiff.compat.msprobe.configuration import Configuration
from traindiff.compat.msprobe.live_files import LiveFiles
from traindiff.compat.msprobe.monitored_parameters import is_monitored, literally
from traindiff.interop.msprobe.layout import make_room, rank_directory, ranks_left
from traindiff.interop.msprobe.step_files import StepFiles
from traindiff.interop.msprobe.tables import Columns
from traindiff.site import canonical_path

RECORDING = "recording"
"""Name of the recording in the directory of the files."""


def recording_settings(configuration: Configuration) -> dict[str, Any]:
    """Those arguments of `record` that follow from a configuration, whose ranks have been checked."""
    detail = ["signs"] if configuration.level != "L0" else ["md5"] if configuration.digest == "md5" else []
    return {
        "observe": "grad",
        "select": [literally(canonical_path(name)) for name in configuration.parameters] or "*",
        "detail": detail,
        "bounds": _bounds(configuration),
        "steps": configuration.steps,
        "ranks": None if configuration.ranks is None else {rank for one in configuration.ranks for rank in one},
    }


def open_files(
    configuration: Configuration, names: Mapping[str, str], *, rank: int, world_size: int
) -> LiveFiles | None:
    """Make room for the files of a rank; None where it is not monitored.

    Args:
        configuration: Says where.
        names: What parameters are called in the files, by canonical path.
        rank: Of this process.
        world_size: How many ranks there are.

    Raises:
        ConfigError: The directory holds the files of another run.
    """
    if not is_monitored(configuration, rank):
        return None
    directory = Path(configuration.dump_path)
    fix = 'Give another "dump_path", or write "overwrite": true to replace them.'
    where = f'{configuration.source}, "dump_path": "{directory}"'
    written = {one for one in range(world_size) if is_monitored(configuration, one)}
    stale = {rank} | (ranks_left(directory) - written if rank == min(written) else set())
    make_room(directory, ranks=stale, overwrite=configuration.overwrite, where=where, fix=fix)
    files = StepFiles(rank_directory(directory, rank), _columns(configuration), names)
    return LiveFiles(files, rank=rank, bounds=_bounds(configuration))


def recording_of(configuration: Configuration) -> str:
    """Path of the recording."""
    return str(Path(configuration.dump_path) / RECORDING)


def _bounds(configuration: Configuration) -> tuple[float, ...]:
    """Rounded to float32, with which msprobe compares."""
    return tuple(float(np.float32(one)) for one in configuration.bounds) if configuration.level == "L2" else ()


def _columns(configuration: Configuration) -> Columns:
    if configuration.level == "L0":
        return Columns(digest="MD5" if configuration.digest == "md5" else "fingerprint")
    return Columns(bounds=configuration.bounds if configuration.level == "L2" else None)
