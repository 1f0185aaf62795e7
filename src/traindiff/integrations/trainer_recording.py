"""A recording that the callback of a trainer begins and ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from traindiff.core.settings import SETTINGS, check_names, record_settings, recording_path
from traindiff.observe.torch.session.models import called_of, outermost_around, trained_parts
from traindiff.observe.torch.session.record import recorder_of
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import find_targets


class TrainerRecording:
    """Records from the moment when the trainer has prepared everything, until the end of the training.

    Args:
        path: Directory to write.
        settings: Settings of `traindiff.record`, by name.

    Attributes:
        recorder: The running recording; None if there is none.

    Raises:
        ConfigError: A setting is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        check_names(settings, known=("overwrite", *SETTINGS))
        self._path = recording_path(path)
        self._overwrite = bool(settings.get("overwrite", False))
        self._settings = record_settings(**{name: settings[name] for name in settings if name != "overwrite"})
        self.recorder: Recorder | None = None

    def begin(self, model: nn.Module, *, first_step: int, calls_parts: bool = False) -> None:
        """Record the training of a model, with the wrappers that the trainer has put around it.

        Args:
            model: The user's model.
            first_step: Number of steps before the checkpoint from which this run continues.
            calls_parts: Whether the trainer also calls other methods of the model than `forward`, which call parts.

        Raises:
            ConfigError: The path is taken, or a setting does not fit the model.
        """
        self.end()
        whole = outermost_around(model)
        called = [whole, *trained_parts(whole)] if calls_parts and whole is model else called_of(whole)
        settings = self._settings
        targets = find_targets(
            whole, None, select=settings.select, shards=settings.shards, called=called, operators=settings.operators
        )
        self.recorder = recorder_of(self._path, targets, settings, overwrite=self._overwrite, first_step=first_step)

    def end(self) -> None:
        """Complete the recording, if there is one."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()
