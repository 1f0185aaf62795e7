"""A micro-batch that one stage of a pipeline works on, and its place in the dataflow of the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field

from traindiff.taps.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A micro-batch of a pipeline's schedule, on one stage.

    Attributes:
        stage: Number of the stage.
        num_stages: How many stages the pipeline has, over all ranks.
        number: The micro-batch's number in this call of the schedule.
        count: How many micro-batches that has.
        backward: Whether the stage works on its backward pass.
        again: Whether that goes through nodes a second time, for the gradients of parameters alone.
    """

    stage: int
    num_stages: int
    number: int
    count: int
    backward: bool = False
    again: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the stage receives what the whole model receives."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns what the whole model returns."""
        return self.stage == self.num_stages - 1

    @property
    def place(self) -> int:
        """Where this is in the dataflow of a step: forward passes stage by stage, then backward passes in reverse."""
        return 2 * self.num_stages - self.stage if self.backward else 1 + self.stage


@dataclass(slots=True, kw_only=True)
class ChunkState:
    """What is counted of one micro-batch on one stage, from its forward pass to its backward pass.

    Attributes:
        calls: Calls of modules so far.
        batch: What the stage received; None before that.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    batch: Batch | None = None
