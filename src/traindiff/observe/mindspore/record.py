"""`traindiff.mindspore.record`: attach the taps to a MindSpore training and write what they see."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Unpack

from mindspore import nn

from traindiff.core.settings import (
    CommonOptions,
    RecordSettings,
    check_names,
    record_settings,
    recording_path,
    takes_settings,
)
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.errors import ConfigError, Problem
from traindiff.observe.mindspore.recorder import GRAPH, Recorder, mode
from traindiff.observe.mindspore.targets import Optimizers, find_targets

OBSERVABLE_HERE = ("batch", "forward", "grad", "optimizer", "update", "param")
"""What can be observed of a MindSpore training."""

OUTSIDE_GRAPHS = ("batch", "forward")
"""The part of that which cannot be observed in code that MindSpore has compiled."""


@takes_settings(CommonOptions)
def record(
    path: str | os.PathLike[str],
    cell: nn.Cell | None,
    optimizer: Optimizers,
    *,
    overwrite: bool = False,
    **settings: Unpack[CommonOptions],
) -> Recorder:
    """Record a MindSpore training's numbers, without disturbing it.

    ```python
    with traindiff.mindspore.record("runs/mindspore", net, optimizer) as run:
        for inputs, labels in batches:
            loss, gradients = loss_and_gradients(inputs, labels)
            optimizer(gradients)
            run.log("loss", loss)
    ```

    The training computes the same bits with and without it. An error inside traindiff disables the part in which it
    happened, is written into the recording, warns once, and the training goes on.

    Call it before the training is compiled: before the first call of a function that `mindspore.jit` has decorated,
    and of `Model.train`. Code compiled earlier cannot be observed; then a warning and the recording say so.

    Args:
        path: Directory to write: a local path or any fsspec URL.
        cell: The model: its paths name cells and parameters, and its calls are the forward passes. None to
            observe optimizers alone, under the names that parameters have themselves.
        optimizer: Whose calls are the steps: one, several, or several by name. With several, each
            counts its own steps, and the first also those of forward passes.
        overwrite: Replace a recording that is already at `path`.
        observe: Some of `batch`, `forward`, `grad`, `optimizer`, `update` and `param`. Default: all of them where
            MindSpore runs in PyNative mode; in graph mode all but `batch` and `forward`.
        select: Globs over canonical paths of cells and parameters, e.g. `"encoder.3.*"`.
        detail: What is kept of a tensor, one or several of `summary` (always), `exponents`, `signs`, `md5` and
            `tensors`, as `traindiff.record` has them.
        bounds: Ascending numbers: count how many elements of each gradient of a parameter lie in the intervals
            between them. See `traindiff explain gradient-monitor`.
        steps: Steps to record, e.g. `"0-9,20,30-"` or `range(10)`. Default: all.
        ranks: Ranks to record. Default: all.
        every: Record only every n-th step, counted from 0.
        batch_axis: Where the batch axis is, if it is not axis 0: one axis for all, or by glob over
            paths, None for tensors without one. See `traindiff explain batch-axis`.
        strict: Raise errors of traindiff's own instead of going on without the part that failed.

    Returns:
        The running recording: a context manager with `log`, `close` and `step`.

    Raises:
        ConfigError: A setting is wrong, `select` matches nothing, `path` is taken, or `observe` names something
            that cannot be observed here. Nothing was attached and nothing was written.
    """
    check_names(settings, known=("optimizer", "overwrite", *CommonOptions.__optional_keys__))
    directory = recording_path(path)
    by_default = settings.get("observe") is None
    if by_default:
        settings["observe"] = _seen_by_default()
    checked = record_settings(**settings)
    targets = find_targets(cell, optimizer, select=checked.select)
    if cell is None and by_default:
        checked = replace(checked, observe=checked.observe - set(OUTSIDE_GRAPHS))
    _refuse_unseen(checked, without_cell=cell is None)
    return Recorder(directory, targets, checked, overwrite=overwrite)


def _seen_by_default() -> tuple[str, ...]:
    compiled = mode() == GRAPH
    return tuple(name for name in OBSERVABLE_HERE if not (compiled and name in OUTSIDE_GRAPHS))


def _refuse_unseen(settings: RecordSettings, *, without_cell: bool) -> None:
    """Raise ConfigError if `observe` names something that cannot be observed here."""
    problems = []
    for name in (name for name in OBSERVABLE if name in settings.observe):
        where = "record(observe=...)"
        if name not in OBSERVABLE_HERE:
            what = f'"{name}" cannot be observed of a MindSpore training.'
            fix = f"Name some of: {', '.join(OBSERVABLE_HERE)}. Losses are recorded with run.log(...)."
        elif name in OUTSIDE_GRAPHS and without_cell:
            what, fix = f'"{name}" is of the model, and no cell was given.', "Give the cell, or leave it out."
        elif name in OUTSIDE_GRAPHS and mode() == GRAPH:
            what = f'"{name}" cannot be seen in graph mode, in which MindSpore compiles cells as a whole.'
            fix = "Leave it out, or train with mindspore.set_context(mode=mindspore.PYNATIVE_MODE)."
        else:
            continue
        problems.append(Problem(where=where, what=what, fix=fix))
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
