"""Monitor the optimizers of a PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from traindiff.compat.msprobe.configuration import Configuration
from traindiff.compat.msprobe.live_files import LiveFiles
from traindiff.compat.msprobe.monitored_parameters import check_parameters, check_ranks
from traindiff.compat.msprobe.session import open_files, recording_of, recording_settings
from traindiff.site import canonical_paths

if TYPE_CHECKING:
    from torch import nn

    from traindiff.sessions.recorder import Recorder
    from traindiff.sessions.targets import Targets


def attach(configuration: Configuration, model: nn.Module | Sequence[nn.Module]) -> tuple[Recorder, LiveFiles | None]:
    """Begin a recording, and have the files written behind it.

    Raises:
        ConfigError: See `PrecisionDebugger.monitor`.
    """
    from traindiff.sessions.process_rank import rank_and_world_size
    from traindiff.sessions.record import STANDARD_SETTINGS
    from traindiff.sessions.recorder import Recorder
    from traindiff.sessions.step_writer import on_disk
    from traindiff.sessions.targets import find_targets
    from traindiff.settings import record_settings

    rank, world_size = rank_and_world_size()
    check_ranks(configuration, world_size)
    settings = record_settings(**{**STANDARD_SETTINGS, **recording_settings(configuration)})
    settings = replace(settings, counts_skipped=False)
    every = find_targets(model, None, select=("*",))
    names = _names(every, model)
    check_parameters(configuration, [*every.parameters, *every.tied, *names.values()])
    targets = every if settings.select == ("*",) else find_targets(model, None, select=settings.select)
    files = open_files(configuration, names, rank=rank, world_size=world_size)
    path = recording_of(configuration)
    open_writer = on_disk(path, overwrite=configuration.overwrite, follower=files)
    return Recorder(path, targets, settings, overwrite=configuration.overwrite, open_writer=open_writer), files


def _names(targets: Targets, model: nn.Module | Sequence[nn.Module]) -> Mapping[str, str]:
    """What the model calls its parameters, by canonical path: wrappers put something in front.

    Of several, which are parts of one model, the paths are the names.
    """
    if isinstance(model, Sequence):
        return {}
    found = canonical_paths([name for name, _ in model.named_parameters()])
    return {path: name for name, path in found.items() if path in targets.parameters}
