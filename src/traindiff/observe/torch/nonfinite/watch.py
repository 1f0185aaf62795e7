"""`traindiff.watch`: a flight recorder of one training, which names where its numbers first go wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, Never, TextIO

from torch import nn

from traindiff.core.settings import check_names, record_settings
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight
from traindiff.observe.torch.nonfinite.origin import Origin
from traindiff.observe.torch.nonfinite.settings import DEFAULT_WARNINGS, SETTINGS, watch_settings
from traindiff.observe.torch.nonfinite.watcher import Watcher
from traindiff.observe.torch.session.targets import Optimizers, find_targets

_OBSERVE = ("loss", "grad", "optimizer", "param")
"""Phases for which the watch uses the taps of a recording; `module_calls` follows modules."""


def watch(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    frames: int = 21,
    trace: int | Iterable[int] = (),
    abort_after: int | None = None,
    on_detect: str | Callable[[Origin], Any] = "raise",
    output: str | os.PathLike[str] | None = "traindiff-watch",
    masks: str | Iterable[str] = (),
    nonfinite: str | Iterable[str] = (),
    warn: str | Collection[str] = DEFAULT_WARNINGS,
    keep_inputs: bool = False,
    file: TextIO | None = None,
    **misspelt: Never,
) -> Watcher:
    """Watch a training for NaN and infinity, forward, backward, in gradients and in the optimizer.

    ```python
    with traindiff.watch(model, optimizer):
        for inputs, labels in batches:
            ...  # forward, backward, optimizer.step(), as ever
    ```

    The first tensor in execution order that is not finite although everything that it was computed from is finite, is
    the origin. It is named in one sentence, below the last frames; the call of the module that made it is saved with
    its tensors for `traindiff rerun`; and `NonFiniteError` is raised where it happened. Until then the training
    computes the same bits as without it, and nothing is printed.

    Args:
        model: The root module that the training loop calls, wrapped (DDP, `torch.compile`) or not.
        optimizer: Whose calls are the steps; None finds the optimizers of `model` when they first step.
        frames: How many frames of each part of a step are kept and printed.
        trace: Steps of which every frame is printed, counted from 0. In these nothing is detected.
        abort_after: Raise `StoppedError` when this step has ended.
        on_detect: `"raise"` a `NonFiniteError`, `"warn"` and let the training go on, or a function that is called with
            the `Origin`.
        output: Directory for what is saved, one below it for each origin; None saves nothing.
        masks: Globs over sites of inputs and outputs that may hold -inf, e.g. `"* input.attention_mask"`. What holds
            nothing but 0 and -inf, and -inf that a module turns into finite numbers, needs no declaration.
        nonfinite: Globs over sites of inputs, outputs and buffers that may hold NaN and infinities of both signs, e.g.
            `"(root) input[0]"` for missing values. What is computed from them must be finite, unless it is named too.
        warn: Early warnings to give; see `traindiff explain watch`.
        keep_inputs: Keep what each module is given until its backward pass is over, so that this can be captured in any
            case. Left out, it is captured where autograd keeps the same tensors, and costs no memory.
        file: Where frames are printed; standard error where left out.
        misspelt: What is no setting is an error that names the nearest one.

    Returns:
        The running watch: a context manager with `close`.

    Raises:
        ConfigError: A setting is wrong, or the model is watched already. Nothing was attached.
    """
    check_names(misspelt, known=("optimizer", *SETTINGS), where="watch({}=...)")
    settings = watch_settings(
        frames=frames, trace=trace, abort_after=abort_after, on_detect=on_detect, output=output, masks=masks,
        nonfinite=nonfinite, warn=warn, keep_inputs=keep_inputs, file=file,
    )  # fmt: skip
    with out_of_sight():
        targets = find_targets(model, optimizer, select=("*",), caller="watch")
    return Watcher(targets, settings, record_settings(observe=_OBSERVE))
