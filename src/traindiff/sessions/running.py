"""Run a recipe and record it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import nn

from traindiff.errors import ConfigError, Problem
from traindiff.recording import open_recording
from traindiff.replica_setting import ReplicaSetting
from traindiff.replicas.making import make_replica
from traindiff.replicas.random_rounding import is_rounded, randomly_rounded, rounding_key
from traindiff.sessions.forced import ForcedValues
from traindiff.sessions.recipe import Recipe, Training, logged, prepared, undisturbed_random_state
from traindiff.sessions.recorder import Recorder
from traindiff.sessions.targets import Targets, find_targets
from traindiff.settings import RecordSettings, record_settings

STANDARD_SETTINGS: dict[str, Any] = {
    "observe": None, "select": "*", "detail": "summary", "steps": None, "ranks": None, "every": 1,
    "batch_axis": None, "evaluation": False, "strict": False, "replica": None,
}  # fmt: skip
"""What `traindiff.record` does by default."""


def run_recipe(
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    steps: int,
    seed: int,
    asked_by: str,
    forced_by: str | None = None,
    on_step: Callable[[int], None] | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> str:
    """Train for some steps, from scratch, and record it.

    Args:
        recipe: Prepares the training.
        path: Recording to write.
        steps: Batches to train on.
        seed: Of torch's, NumPy's and Python's generators, which are given back as they were.
        asked_by: The call, for messages.
        forced_by: A recording with full tensors, whose values are put in place of the training's once they have
            been observed, in the steps that it has. A `ulp` replica then perturbs these values.
        on_step: Called with the number of each batch after it was trained on.
        overwrite: Replace a recording that is already at `path`.
        **settings: Of `traindiff.record`, over those of the training itself.

    Returns:
        The path.

    Raises:
        ConfigError: The recipe cannot be used, a setting is wrong, or there are no batches.
    """
    with undisturbed_random_state():
        training = prepared(recipe, seed=seed, asked_by=asked_by)
        checked = record_settings(**{**STANDARD_SETTINGS, **training.record, **settings})
        targets = find_targets(training.model, training.optimizer, select=checked.select)
        forced = None if forced_by is None else _forced_values(forced_by, checked.replica)
        with _recorder(os.fspath(path), targets, checked, forced, overwrite=overwrite) as recorder:
            trained = _train(training, recorder, steps, on_step)
    if not trained:
        problem = Problem(where="batches", what="are none.", fix="Give at least one batch.")
        raise ConfigError(asked_by, [problem])
    return os.fspath(path)


def _train(training: Training, recorder: Recorder, steps: int, on_step: Callable[[int], None] | None) -> int:
    trained = 0
    for number, batch in enumerate(islice(training.batches, steps)):
        for name, value in logged(training.step(batch)):
            recorder.log(name, value)
        trained += 1
        if on_step:
            on_step(number)
    return trained


@contextmanager
def _recorder(
    path: str, targets: Targets, settings: RecordSettings, forced: ForcedValues | None, *, overwrite: bool
) -> Iterator[Recorder]:
    perturbs_values = forced is not None and settings.replica is not None and settings.replica.kind == "ulp"
    replica = None
    if settings.replica is not None and not perturbs_values:
        replica = make_replica(settings.replica, targets.root, targets.names)
    with Recorder(path, targets, settings, overwrite=overwrite, replica=replica, forced=forced) as recorder:
        yield recorder


def _forced_values(path: str, replica: ReplicaSetting | None) -> ForcedValues:
    if replica is None or replica.kind != "ulp":
        return ForcedValues(open_recording(path))
    seed = replica.seed
    return ForcedValues(
        open_recording(path),
        perturb=lambda value, site: randomly_rounded(value, rounding_key(seed, site)) if is_rounded(value) else value,
    )


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model runs in compiled code, whose tensors nothing can be put in place of."""
    from traindiff.taps._torch_compat import is_compiled as compiled

    return any(compiled(module) for module in model.modules())
