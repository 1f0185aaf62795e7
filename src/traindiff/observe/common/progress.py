"""The place in the training: step, micro-step, calls of modules, rows of the batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from traindiff.core.observation import PLACE


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch that the root module is working on.

    Attributes:
        size: Samples in it: the length of the root input's batch axis.
        lengths: Lengths of axis 0 with one or several entries per sample: `size`, and its products with the lengths of
            the axes that follow it in the root's inputs, e.g. batch x sequence.
    """

    size: int
    lengths: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A micro-batch of a pipeline's schedule, on one stage.

    Attributes:
        stage: Number of the stage.
        num_stages: Stages of the pipeline, over all ranks.
        number: The micro-batch's number in this call of the schedule.
        count: Micro-batches of this call.
        backward: True during its backward pass on the stage.
        again: True if that pass visits nodes a second time, only for the gradients of parameters.
    """

    stage: int
    num_stages: int
    number: int
    count: int
    backward: bool = False
    again: bool = False

    @property
    def is_first(self) -> bool:
        """True if the stage receives the inputs of the whole model."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if the stage returns the outputs of the whole model."""
        return self.stage == self.num_stages - 1

    @property
    def place(self) -> int:
        """The position in the dataflow of a step: forward passes stage by stage, then backward passes in reverse."""
        return 2 * self.num_stages - self.stage if self.backward else 1 + self.stage


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters that all taps of one session share. Only the training's own thread writes them.

    Attributes:
        optimizer: Name of the optimizer whose calls delimit the steps of forward and backward passes.
        first_step: Number of the first step of each optimizer, for a training that continues from a checkpoint.
        steps: Completed calls per optimizer, with those before `first_step`; `number_of` reads them.
        evaluation: Evaluations of the loss completed in the current step; `late_evaluation`, of the step before, the
            last one. Several are there if the optimizer's step calls a closure several times, or if parameters change
            between two backward passes.
        micro_step: Forward-backward rounds completed in the current evaluation.
        batch: The batch on which the root module is working; None outside of it.
        latest_batch: The batch on which it worked last in this step, with gradients.
        evaluating: Inside a forward pass of the root without gradients.
        in_forward: Inside a forward pass of the root.
        observing: The current step is recorded.
        forward_done: A forward pass of the root that keeps gradients has ended in this step.
        backward_done: A backward pass has ended since then.
        order: Observations so far in this step; `late_order`, in the step before.
        samples: Size of the latest batch; 1 if it is not known.
        data_rank: This rank's number among the `data_size` ranks that share the batch.
        interleaved: These ranks have its samples in turn, not one block each.
        chunk: The micro-batch on which a pipeline stage is working; then micro-steps are its micro-batches.
        num_stages: Stages of the pipeline; 1 without a pipeline.
        given: Slots of the latest inputs of the root that are part of the batch.
        hidden: Inside calls of modules that are no part of the training.
        unseen: The step of the optimizer that is ending was called without hooks.
        loss_scaled: The loss of this step was multiplied by a loss scale.
    """

    optimizer: str = "optimizer"
    first_step: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    evaluation: int = 0
    late_evaluation: int = 0
    micro_step: int = 0
    batch: Batch | None = None
    latest_batch: Batch | None = None
    evaluating: bool = False
    in_forward: bool = False
    observing: bool = True
    forward_done: bool = False
    backward_done: bool = False
    order: int = 0
    late_order: int = 0
    samples: int = 1
    data_rank: int = 0
    data_size: int = 1
    interleaved: bool = False
    chunk: Chunk | None = None
    num_stages: int = 1
    given: frozenset[str] = frozenset()
    hidden: bool = False
    loss_scaled: bool = False
    unseen: bool = False
    _chunks: tuple[int, int] = (0, 0)  # of this step: before the running call of the schedule, and with it
    # By stage and micro-step, from its forward pass to its backward pass: calls of modules so far, and the batch.
    _calls_of_chunks: dict[tuple[int, int], dict[tuple[str, str], int]] = field(default_factory=dict)
    _batches_of_chunks: dict[tuple[int, int], Batch] = field(default_factory=dict)
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)
    _rows: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Current step of the optimizer that counts."""
        return self.number_of(self.optimizer)

    def number_of(self, optimizer: str) -> int:
        """Current step of an optimizer."""
        return self.steps.get(optimizer, self.first_step)

    @property
    def is_in_pipeline(self) -> bool:
        """True if this rank has stages of a pipeline."""
        return self.chunk is not None or self.num_stages > 1

    @property
    def current_batch(self) -> Batch | None:
        """The batch that is being computed: after a forward pass, in the loss and in activation checkpointing, too."""
        return self.batch or (None if self.evaluating else self.latest_batch)

    def next_order(self, *, late: bool = False) -> int:
        """Position in execution order for the next observation of the step, or of the step before.

        Pipeline stages work at the same time; their observations are brought into the order of the whole model.
        """
        if late:
            self.late_order += 1
            return self.late_order - 1 + PLACE * self._last_place
        order = self.order
        self.order = order + 1
        return order if self.num_stages == 1 and self.chunk is None else order + PLACE * self._place

    def next_orders(self, count: int) -> int:
        """The first of `count` positions that follow one another, for as many observations; see `next_order`."""
        first = self.next_order()
        self.order += count - 1
        return first

    @property
    def _place(self) -> int:
        if self.chunk is not None:
            return self.chunk.place
        return self._last_place if self.forward_done else 0

    @property
    def _last_place(self) -> int:
        return 2 * self.num_stages + 1 if self.num_stages > 1 else 0

    def next_call(self, path: str, stage: str) -> int:
        """The number of earlier calls of `path` in this micro-step; counts this one."""
        call = self._calls.get((path, stage), 0)
        self._calls[path, stage] = call + 1
        return call

    def rows(self, site: tuple[str, ...], rows: int, *, samples: int) -> tuple[int, tuple[int, int] | None]:
        """The place of the next `rows` of `site`, which belong to so many samples, in the global batch; counts them.

        Each micro-batch of the global batch has equally many samples of each rank. With a pipeline, each call of its
        schedule is given one such micro-batch.

        Returns:
            The first row, and the spacing of the rows; see `Shard`.
        """
        counted = self._rows.get(site, 0)
        self.count(site, rows)
        if self.interleaved and self.data_size > 1 and rows % samples == 0:
            together = rows // samples
            return counted * self.data_size + self.data_rank * together, (together, together * self.data_size)
        if self.chunk is not None and self.data_size > 1:
            within = self.chunk.number * rows
            return (counted - within) * self.data_size + self.data_rank * self.chunk.count * rows + within, None
        return counted * self.data_size + self.data_rank * rows, None

    def counted(self, site: tuple[str, ...]) -> int:
        """The rows of a site that `rows` has counted in this step so far."""
        return self._rows.get(site, 0)

    def count(self, site: tuple[str, ...], rows: int) -> None:
        """Count rows of a site, as `rows` does."""
        self._rows[site] = self._rows.get(site, 0) + rows

    def forward(
        self, batch: Batch | None, *, evaluating: bool, continues: bool = False
    ) -> AbstractContextManager[None]:
        """Inside the root's forward pass. The first one after a backward begins the next micro-step.

        Args:
            batch: The batch on which it works.
            evaluating: It keeps no gradients.
            continues: The micro-step goes on, although a backward pass has ended.
        """
        if not evaluating and self.backward_done and self.chunk is None:
            self.backward_done = False
            if not continues:
                self.micro_step += 1
                self._calls.clear()
        if not evaluating and not self.forward_done:
            self.loss_scaled = False
        if batch and not evaluating:
            self.latest_batch, self.samples = batch, batch.size
            if self.chunk is not None:
                self._batches_of_chunks[self.chunk.stage, self.micro_step] = batch
        return _Forward(self, batch=batch, evaluating=evaluating, in_forward=True)

    def begin_evaluation(self) -> None:
        """Note that what follows evaluates the loss again: it is no further micro-step of the evaluation before."""
        self.evaluation += 1
        self.micro_step = 0
        self.backward_done = False
        self._calls.clear()
        self._rows.clear()

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        if self.chunk is None:
            self.backward_done = self.forward_done

    def begin_schedule(self, *, num_stages: int, num_chunks: int) -> None:
        """Note that a pipeline's schedule was called: its micro-batches are further micro-steps of the step."""
        self.num_stages = num_stages
        self._chunks = self._chunks[1], self._chunks[1] + num_chunks

    def working_on(self, chunk: Chunk) -> AbstractContextManager[None]:
        """Inside the forward or the backward pass of a stage on one micro-batch of the schedule."""
        micro_step = self._chunks[0] + chunk.number
        calls = self._calls_of_chunks.setdefault((chunk.stage, micro_step), {})
        batch = self._batches_of_chunks.get((chunk.stage, micro_step))
        return _While(self, chunk=chunk, micro_step=micro_step, _calls=calls, latest_batch=batch)

    def before_all_chunks(self) -> AbstractContextManager[None]:
        """Inside it, observations come before everything on which a stage works."""
        return _While(self, chunk=None)

    def hiding(self) -> AbstractContextManager[None]:
        """Inside calls of the model's modules that are no part of the training."""
        return _While(self, hidden=True, observing=False)

    def end_step(self, optimizer: str, *, observing: bool) -> None:
        """Note that a call of `optimizer` has ended; `observing` tells whether the next step is recorded."""
        self.steps[optimizer] = self.number_of(optimizer) + 1
        self.unseen = False
        if optimizer == self.optimizer:
            self.observing = observing
            self.late_evaluation, self.evaluation = self.evaluation, 0
            self.micro_step = 0
            self.latest_batch = None
            self.late_order, self.order = self.order, 0
            self.forward_done = self.backward_done = False
            self._calls.clear()
            self._rows.clear()
            self._chunks = (0, 0)
            self._calls_of_chunks.clear()
            self._batches_of_chunks.clear()


class _While(AbstractContextManager[None]):
    """Inside it, some attributes have other values; quicker than a generator, as several are entered in each step."""

    def __init__(self, progress: Progress, **values: Any) -> None:
        self._progress = progress
        self._values = values

    def __enter__(self) -> None:
        progress, outer = self._progress, dict[str, Any]()
        for name, value in self._values.items():
            outer[name] = getattr(progress, name)
            setattr(progress, name, value)
        self._outer = outer

    def __exit__(self, *_: object) -> None:
        for name, value in self._outer.items():
            setattr(self._progress, name, value)


class _Forward(_While):
    """Inside the root's forward pass."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._progress.forward_done |= not self._values["evaluating"]
