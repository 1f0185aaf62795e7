"""What a configuration says of a recording, and of the files behind it; the same under every framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from traindiff.compat.msprobe.configuration import TASK, Configuration
from traindiff.compat.msprobe.layout import make_room, rank_directory, ranks_left
from traindiff.compat.msprobe.live_files import LiveFiles, StepFiles
from traindiff.compat.msprobe.tables import Columns
from traindiff.core.settings import CommonOptions
from traindiff.core.site import canonical_path
from traindiff.errors import ConfigError, Problem


def check_parameters(configuration: Configuration, known: Iterable[str]) -> None:
    """Refuse names in `param_list` that no parameter has.

    Raises:
        ConfigError: Some are none.
    """
    there = dict.fromkeys(known)
    problems = [
        _unknown_parameter(name, list(there))
        for name in configuration.parameters
        if name not in there and canonical_path(name) not in there
    ]
    if problems:
        raise ConfigError(configuration.source, problems, consequence="nothing is monitored")


def check_ranks(configuration: Configuration, world_size: int) -> None:
    """Refuse ranks that there are not.

    Raises:
        ConfigError: Some are none.
    """
    beyond = [max(world_size, one.start) for one in configuration.ranks or () if one.stop > world_size]
    if beyond:
        ranks = "there is rank 0 alone" if world_size == 1 else f"there are ranks 0 to {world_size - 1}"
        problem = Problem(where='"rank"', what=f"holds {beyond[0]}, and {ranks}.", fix='Write "rank": [] for all.')
        raise ConfigError(configuration.source, [problem], consequence="nothing is monitored")


def is_monitored(configuration: Configuration, rank: int) -> bool:
    """Whether a rank is asked for."""
    return configuration.ranks is None or any(rank in one for one in configuration.ranks)


def literally(name: str) -> str:
    """A glob that matches a name and nothing else."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in name)


def _unknown_parameter(name: str, known: Sequence[str]) -> Problem:
    near = get_close_matches(name, known, n=1)
    suggestion = f'Did you mean "{near[0]}"? ' if near else ""
    shown = ", ".join(known[:5]) + (", ..." if len(known) > 5 else ".")
    return Problem(
        where=f'"{TASK}", "param_list"', what=f'"{name}" is no parameter of the model.',
        fix=f"{suggestion}There are {len(known)}: {shown}",
    )  # fmt: skip


RECORDING = "recording"
"""Name of the recording in the directory of the files."""


def recording_settings(configuration: Configuration) -> CommonOptions:
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
