"""Monitor the optimizers of a training as a configuration says: a recording, and msprobe's files behind it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from traindiff.compat.msprobe.configuration import TASK, Configuration
from traindiff.compat.msprobe.exporting import LiveFiles, StepFiles
from traindiff.compat.msprobe.layout import make_room, rank_directory, ranks_in
from traindiff.compat.msprobe.tables import Columns
from traindiff.core.settings import RecordSettings, record_settings
from traindiff.core.site import canonical_path, canonical_paths
from traindiff.errors import ConfigError, Problem, TraindiffWarning, level_of_caller

if TYPE_CHECKING:
    from torch import nn

    from traindiff.observe.mindspore.recorder import Recorder as MindSporeRecorder
    from traindiff.observe.torch.session.recorder import Recorder as TorchRecorder
    from traindiff.observe.torch.session.targets import Targets

RECORDING = "recording"
"""Name of the recording in the directory of the files."""


def monitor_torch(
    configuration: Configuration, model: nn.Module | Sequence[nn.Module]
) -> tuple[TorchRecorder, LiveFiles | None]:
    """Begin a recording of a model of PyTorch, and have the files written behind it.

    Raises:
        ConfigError: See `PrecisionDebugger.monitor`.
    """
    from traindiff.observe.common.writing import on_disk
    from traindiff.observe.torch.session.environment import rank_and_world_size
    from traindiff.observe.torch.session.recorder import Recorder
    from traindiff.observe.torch.session.targets import find_targets

    rank, world_size = rank_and_world_size()
    configuration = _for_ranks(configuration, world_size)
    settings = replace(_settings(configuration), counts_skipped=False, main_gradients=True)
    every = find_targets(model, None, select=("*",))
    names = _names(every, model)
    _check_parameters(configuration, [*every.parameters, *every.tied, *names.values()])
    targets = every if settings.select == ("*",) else find_targets(model, None, select=settings.select)
    files = _open_files(configuration, names, rank=rank, world_size=world_size)
    path = recording_of(configuration)
    open_writer = on_disk(path, overwrite=configuration.overwrite, listener=files)
    return Recorder(path, targets, settings, overwrite=configuration.overwrite, open_writer=open_writer), files


def monitor_mindspore(configuration: Configuration, optimizer: Any) -> tuple[MindSporeRecorder, LiveFiles | None]:
    """The same for an optimizer of MindSpore, in PyNative and graph mode. Parameters have their own names."""
    from traindiff.observe.mindspore.recorder import Recorder, rank_and_world_size
    from traindiff.observe.mindspore.targets import find_targets

    rank, world_size = rank_and_world_size()
    configuration = _for_ranks(configuration, world_size)
    settings = _settings(configuration)
    every = find_targets(None, optimizer, select=("*",))
    _check_parameters(configuration, every.parameters)
    targets = every if settings.select == ("*",) else find_targets(None, optimizer, select=settings.select)
    files = _open_files(configuration, {}, rank=rank, world_size=world_size)
    path = recording_of(configuration)
    return Recorder(path, targets, settings, overwrite=configuration.overwrite, listener=files), files


def recording_of(configuration: Configuration) -> str:
    """Path of the recording."""
    return str(Path(configuration.dump_path) / RECORDING)


def _names(targets: Targets, model: nn.Module | Sequence[nn.Module]) -> Mapping[str, str]:
    """The model's own names of its parameters, by canonical path: wrappers add prefixes to them.

    Of several, which are parts of one model, the paths are the names.
    """
    from traindiff.core.torch_compat.training import parameters_by_name

    if isinstance(model, Sequence):
        return {}
    found = canonical_paths(parameters_by_name(model))
    return {path: name for name, path in found.items() if path in targets.parameters}


def _for_ranks(configuration: Configuration, world_size: int) -> Configuration:
    """The configuration for a training on so many ranks: a single process has no ranks to choose.

    Raises:
        ConfigError: There is no rank with one of the numbers.
    """
    ranks = configuration.ranks
    if world_size == 1:
        if ranks is not None and any(one != range(1) for one in ranks):
            warnings.warn(
                f'monitor(...): the training runs in a single process, so "rank" in {configuration.source} has no '
                f"effect. The files are in {rank_directory(Path(configuration.dump_path), 0)}.",
                TraindiffWarning,
                stacklevel=level_of_caller(),
            )
        return replace(configuration, ranks=None)
    beyond = [max(world_size, one.start) for one in ranks or () if one.stop > world_size]
    if beyond:
        what = f"holds {beyond[0]}, and there are ranks 0 to {world_size - 1}."
        problem = Problem(where='"rank"', what=what, fix='Write "rank": [] for all.')
        raise ConfigError(configuration.source, [problem], consequence="nothing is monitored")
    return configuration


def _settings(configuration: Configuration) -> RecordSettings:
    """The settings of the recording that follow from a configuration."""
    ranks = configuration.ranks
    return record_settings(
        observe="grad",
        select=[_literally(canonical_path(name)) for name in configuration.parameters] or "*",
        detail=["signs"] if configuration.level != "L0" else ["md5"] if configuration.digest == "md5" else [],
        bounds=_bounds(configuration),
        steps=configuration.steps,
        ranks=None if ranks is None else {rank for one in ranks for rank in one},
    )


def _literally(name: str) -> str:
    """A glob that matches a name and nothing else."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in name)


def _bounds(configuration: Configuration) -> tuple[float, ...]:
    """Rounded to float32, with which msprobe compares."""
    return tuple(float(np.float32(one)) for one in configuration.bounds) if configuration.level == "L2" else ()


def _check_parameters(configuration: Configuration, known: Iterable[str]) -> None:
    """Refuse names in `param_list` that no parameter has."""
    there = dict.fromkeys(known)
    problems = [
        _unknown_parameter(name, list(there))
        for name in configuration.parameters
        if name not in there and canonical_path(name) not in there
    ]
    if problems:
        raise ConfigError(configuration.source, problems, consequence="nothing is monitored")


def _unknown_parameter(name: str, known: Sequence[str]) -> Problem:
    near = get_close_matches(name, known, n=1)
    suggestion = f'Did you mean "{near[0]}"? ' if near else ""
    shown = ", ".join(known[:5]) + (", ..." if len(known) > 5 else ".")
    return Problem(
        where=f'"{TASK}", "param_list"', what=f'"{name}" is no parameter of the model.',
        fix=f"{suggestion}There are {len(known)}: {shown}",
    )  # fmt: skip


def _open_files(
    configuration: Configuration, names: Mapping[str, str], *, rank: int, world_size: int
) -> LiveFiles | None:
    """Make room for the files of this rank, in which parameters have `names`; None if it is not monitored."""
    ranks = configuration.ranks
    written = {one for one in range(world_size) if ranks is None or any(one in some for some in ranks)}
    if rank not in written:
        return None
    directory = Path(configuration.dump_path)
    fix = 'Give another "dump_path", or write "overwrite": true to replace them.'
    where = f'{configuration.source}, "dump_path": "{directory}"'
    stale = {rank} | (ranks_in(directory).keys() - written if rank == min(written) else set())
    make_room(directory, ranks=stale, overwrite=configuration.overwrite, where=where, fix=fix)
    directions = configuration.level != "L0"
    files = StepFiles(rank_directory(directory, rank), _columns(configuration), names, directions=directions)
    return LiveFiles(files, rank=rank, bounds=_bounds(configuration))


def _columns(configuration: Configuration) -> Columns:
    if configuration.level == "L0":
        return Columns(digest="MD5" if configuration.digest == "md5" else "fingerprint")
    return Columns(bounds=configuration.bounds if configuration.level == "L2" else None)
