"""Monitor the optimizers of a PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from traindiff.compat.msprobe.configuration import Configuration
from traindiff.compat.msprobe.live_files import LiveFiles
from traindiff.compat.msprobe.session import check_parameters, check_ranks, open_files, recording_of, recording_settings
from traindiff.core.site import canonical_paths

if TYPE_CHECKING:
    from torch import nn

    from traindiff.observe.torch.session.recorder import Recorder
    from traindiff.observe.torch.session.targets import Targets


def attach(configuration: Configuration, model: nn.Module | Sequence[nn.Module]) -> tuple[Recorder, LiveFiles | None]:
    """Begin a recording, and have the files written behind it.

    Raises:
        ConfigError: See `PrecisionDebugger.monitor`.
    """
    from traindiff.core.settings import record_settings
    from traindiff.observe.common.writing import on_disk
    from traindiff.observe.torch.session.environment import rank_and_world_size
    from traindiff.observe.torch.session.recorder import Recorder
    from traindiff.observe.torch.session.targets import find_targets

    rank, world_size = rank_and_world_size()
    check_ranks(configuration, world_size)
    settings = record_settings(**recording_settings(configuration))
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
