"""Run the demo training, healthy or with a fault, and record it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import traindiff
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT
from traindiff.errors import ConfigError, Problem
from traindiff.run.demo.faults import find_fault
from traindiff.run.demo.loop import DemoSettings, StepNumbers, TrainingLoop


def train(
    path: str | os.PathLike[str] | None,
    *,
    fault: str | None = None,
    micro_batches: int = 1,
    steps: int = 8,
    seed: int = 0,
    settings: DemoSettings | None = None,
    on_step: Callable[[int], None] | None = None,
    overwrite: bool = False,
) -> list[StepNumbers]:
    """Train a small GPT on source code and record every phase, with the gradient of each micro-batch.

    Runs with the same seed compute the same mathematics for every value of `micro_batches`: the same samples, the same
    dropout masks, the mean loss over all bytes of the batch. They differ only by the rounding of their sums.

    Args:
        path: Recording to write; None trains without recording.
        fault: Name of the fault, one of `traindiff.run.demo.faults.FAULTS`; None for a healthy training.
        micro_batches: Equal parts in which each batch is computed.
        steps: Number of optimizer steps.
        seed: Seed of weights, dropout masks and order of the text. torch's own generators are not touched.
        settings: The settings; by default 1.3 million parameters on 8 x 64 bytes a step.
        on_step: Called with the number of each step after the step.
        overwrite: Replace a recording that is already at `path`.

    Returns:
        Loss and gradient norm of each step, as they were logged.

    Raises:
        ConfigError: The fault is unknown or cannot happen with so few micro-batches, the batch cannot be divided into
            them, the standard library has no sources, or `path` is taken.
    """
    settings = settings or DemoSettings()
    _check(settings, micro_batches)
    chosen = None if fault is None else find_fault(fault)
    if chosen:
        chosen.check(micro_batches)
    loop = TrainingLoop(settings, micro_batches=micro_batches, seed=seed)
    reported: list[StepNumbers] = []
    with ExitStack() as undo:
        if chosen:
            # Before the recording is attached, so that traindiff sees the faulty training.
            undo.enter_context(chosen.inject(loop))
        run = None
        if path is not None:
            run = undo.enter_context(
                traindiff.record(
                    path, loop.model, loop.optimizer, observe=(*OBSERVED_BY_DEFAULT, "grad.micro"), overwrite=overwrite,
                    # One vector per position; with one sample their number equals that of the bytes in the batch.
                    batch_axis={"transformer.wpe": None},
                )
            )  # fmt: skip
        for step in range(steps):
            numbers = loop.run_step(step)
            if run:
                run.log("loss", numbers.loss)
                run.log("grad_norm", numbers.gradient_norm)
            reported.append(numbers)
            if on_step:
                on_step(step)
    return reported


def _check(settings: DemoSettings, micro_batches: int) -> None:
    if micro_batches < 1 or settings.batch_size % micro_batches:
        divisors = [count for count in range(1, settings.batch_size + 1) if settings.batch_size % count == 0]
        problem = Problem(
            where=f"micro_batches = {micro_batches}",
            what=f"does not divide the {settings.batch_size} samples of a batch into equal parts.",
            fix=f"Write one of {', '.join(map(str, divisors))}.",
        )
        raise ConfigError("the demo", [problem], consequence="nothing was trained")
