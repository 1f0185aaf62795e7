"""Faults of the data: the model is asked the wrong question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch.nn import functional

from traindiff.run.demo.faults.fault import FirstSight, fault, replaced
from traindiff.run.demo.loop import TrainingLoop
from traindiff.run.demo.model import Batch


@fault("label-shift", first_sight=FirstSight(phase="batch", path="", slot="input[1]"))
def label_shift(loop: TrainingLoop) -> Iterator[None]:
    """Targets are shifted twice, so that the model learns to predict the byte after the next.

    Happens when the data pipeline shifts labels and the model shifts them again.
    """
    healthy = loop.batch

    def batch(step: int) -> Batch:
        given = healthy(step)
        # The last position has no target left: cross_entropy passes over -100.
        return replace(given, targets=functional.pad(given.targets[:, 1:], (0, 1), value=-100))

    with replaced(loop, "batch", batch):
        yield


@fault("duplicate-samples", first_sight=FirstSight(phase="batch", path="", slot="input[0]"))
def duplicate_samples(loop: TrainingLoop) -> Iterator[None]:
    """The second half of each batch repeats the first, as data workers with one common seed do."""
    healthy = loop.batch

    def batch(step: int) -> Batch:
        given = healthy(step)
        half = len(given.inputs) // 2
        return Batch(
            inputs=given.inputs[:half].repeat(2, 1),
            targets=given.targets[:half].repeat(2, 1),
            sample_ids=given.sample_ids[:half].repeat(2),
        )

    with replaced(loop, "batch", batch):
        yield
