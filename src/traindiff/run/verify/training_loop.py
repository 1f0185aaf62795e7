"""Train a prepared training for some steps under a recorder: what verification and resuming have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from traindiff.core.settings import SETTINGS, RecordSettings, check_names, record_settings
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import Targets, find_targets
from traindiff.run.config.training import Training, logged
from traindiff.run.verify.recipe import failures_explained

_NO_MORE = object()


def settings_of(training: Training, given: Mapping[str, Any], *, where: str) -> RecordSettings:
    """The settings of a training's recording; those that are given override its own.

    Raises:
        ConfigError: A setting is wrong.
    """
    chosen = {**training.record, **given}
    check_names(chosen, known=SETTINGS, where=f"{where}, record")
    return record_settings(**chosen)


def targets_of(training: Training, settings: RecordSettings) -> Targets:
    """The modules, parameters and optimizers of a training that are recorded."""
    return find_targets(
        training.model, training.optimizer, select=settings.select, shards=settings.shards,
        operators=settings.operators,
    )  # fmt: skip


def train(
    training: Training,
    recorder: Recorder,
    batches: Iterator[Any],
    steps: range,
    *,
    on_step: Callable[[int], None],
    where: str,
    asked_by: str,
) -> int:
    """Train on a batch for each step, as long as there are batches.

    Args:
        training: The training.
        recorder: Writes each step as soon as it is done, whatever happens in the next one.
        batches: The batches that follow.
        steps: Numbers of the steps.
        on_step: Called with the number of each step after it.
        where: The recipe, for messages.
        asked_by: The call, for messages.

    Returns:
        The number of batches.

    Raises:
        ConfigError: The training fails.
    """
    explained = partial(failures_explained, asked_by=asked_by)
    for count, step in enumerate(steps):
        with explained(f"asking for batch {step}", where=f"{where}, batches"):
            batch = next(batches, _NO_MORE)
        if batch is _NO_MORE:
            return count
        with explained(f"calling it with batch {step}", where=f"{where}, step"):
            returned = training.train_on(batch)
        for name, value in logged(returned):
            recorder.log(name, value)
        recorder.write()
        on_step(step)
    return len(steps)
