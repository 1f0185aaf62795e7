"""Faults of the optimizer: right gradients, wrong update."""

from __future__ import annotations

from collections.abc import Iterator

from traindiff.run.demo.faults.fault import FirstSight, fault, replaced, replaced_entry
from traindiff.run.demo.loop import TrainingLoop


@fault(
    "decay-on-biases",
    first_sight=FirstSight(phase="optimizer", path="optimizer.groups[1]", slot="weight_decay"),
)
def decay_on_biases(loop: TrainingLoop) -> Iterator[None]:
    """Weight decay acts on biases and LayerNorms too, because the list of exceptions did not match."""
    with replaced_entry(loop.optimizer.param_groups[1], "weight_decay", loop.settings.weight_decay):
        yield


@fault("beta2", first_sight=FirstSight(phase="optimizer", path="optimizer.groups[0]", slot="betas[1]"))
def beta2(loop: TrainingLoop) -> Iterator[None]:
    """AdamW runs with its default beta2, 0.999, instead of the 0.95 of the demo."""
    decay, rest = loop.optimizer.param_groups
    betas = (loop.settings.betas[0], 0.999)
    with replaced_entry(decay, "betas", betas), replaced_entry(rest, "betas", betas):
        yield


@fault("learning-rate", first_sight=FirstSight(phase="optimizer", path="optimizer.groups[0]", slot="lr"))
def learning_rate(loop: TrainingLoop) -> Iterator[None]:
    """The schedule is one step ahead, as where it is advanced before the optimizer."""
    healthy = loop.learning_rate
    with replaced(loop, "learning_rate", lambda step: healthy(step + 1)):
        yield


@fault(
    "moments-dropped",
    first_sight=FirstSight(step=3, phase="optimizer", path="transformer.wte.weight", slot="step"),
)
def moments_dropped(loop: TrainingLoop) -> Iterator[None]:
    """Before step 3 the optimizer's state is lost, as when a checkpoint is resumed without it."""
    healthy = loop.begin_step

    def begin_step(step: int) -> None:
        healthy(step)
        if step == 3:
            loop.optimizer.state.clear()

    with replaced(loop, "begin_step", begin_step):
        yield
