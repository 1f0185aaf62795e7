"""Monitor an optimizer of MindSpore, in PyNative and graph mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traindiff.compat.msprobe.configuration import Configuration
from traindiff.compat.msprobe.live_files import LiveFiles
from traindiff.compat.msprobe.session import check_parameters, check_ranks, open_files, recording_of, recording_settings

if TYPE_CHECKING:
    from traindiff.observe.mindspore.recorder import Recorder


def attach(configuration: Configuration, optimizer: Any) -> tuple[Recorder, LiveFiles | None]:
    """Begin a recording, and have the files written behind it. Parameters have the names that they have themselves.

    Raises:
        ConfigError: See `PrecisionDebugger.monitor`.
    """
    from traindiff.core.settings import record_settings
    from traindiff.observe.mindspore.recorder import Recorder, rank_and_world_size
    from traindiff.observe.mindspore.targets import find_targets

    rank, world_size = rank_and_world_size()
    check_ranks(configuration, world_size)
    settings = record_settings(**recording_settings(configuration))
    every = find_targets(None, optimizer, select=("*",))
    check_parameters(configuration, every.parameters)
    targets = every if settings.select == ("*",) else find_targets(None, optimizer, select=settings.select)
    files = open_files(configuration, {}, rank=rank, world_size=world_size)
    path = recording_of(configuration)
    return Recorder(path, targets, settings, overwrite=configuration.overwrite, follower=files), files
