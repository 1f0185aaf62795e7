"""A recording in progress: its taps, what they hand over, and the files it goes into."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.observation import ITSELF, NO_REPLICA, TAP_FAILED, Merge, Observation
from traindiff.core.settings import RecordSettings
from traindiff.errors import ConfigError, Problem
from traindiff.observe.common.circumstances import Ending, close_at_exit
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.user_input import (
    NotLoggedError,
    RefusedLogs,
    logged_name,
    number_of,
    of_one_element,
    weight_of,
)
from traindiff.observe.common.writing import OpenWriter, StepWriter, on_disk
from traindiff.observe.torch.hooks.nested import as_tensor
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight
from traindiff.observe.torch.perturb.replica import NAME as REPLICA
from traindiff.observe.torch.perturb.replica import Replica
from traindiff.observe.torch.session.attachment import Attachment
from traindiff.observe.torch.session.environment import describe, rank_and_world_size
from traindiff.observe.torch.session.observations import Containment, Observations
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.session.teacher_forcing import ForcedValues
from traindiff.observe.torch.sharding.layout import in_pipeline
from traindiff.observe.torch.sharding.pipeline import Pipeline, find_pipeline
from traindiff.observe.torch.sharding.registry import ENGINES


class Recorder:
    """A recording in progress. Made by `traindiff.record`; ended by `close` or its `with` block.

    Args:
        path: Directory to write, or what the run is called.
        targets: What is observed.
        settings: How.
        overwrite: Replace a recording that is already at `path`.
        replica: Perturbs the training, where that is wanted.
        forced: What is put in place of what was observed, if anything.
        recipe: Name of the recipe that has prepared the training.
        open_writer: Makes what takes the steps; left out, they go to a recording at `path`.
        before_every_step: Record parameters before each step, not only where the step before was not recorded.
        last_seen: Called with each observation.
        first_step: Number of the step that comes first, where the training goes on from a checkpoint.

    Attributes:
        path: Directory that is being written.
    """

    def __init__(
        self,
        path: str,
        targets: Targets,
        settings: RecordSettings,
        *,
        overwrite: bool,
        replica: Replica | None = None,
        forced: ForcedValues | None = None,
        recipe: str | None = None,
        open_writer: OpenWriter | None = None,
        before_every_step: bool = False,
        last_seen: Callable[[Observation], None] | None = None,
        first_step: int = 0,
    ) -> None:
        self.path = path
        self._settings = settings
        self._forced = forced
        self._pipeline: Pipeline | None = None
        self._refused = RefusedLogs()
        self._progress = Progress(
            optimizer=targets.primary,
            steps={targets.primary: first_step} if first_step else {},
            observing=settings.records(first_step),
            data_rank=targets.layout.data.rank,
            data_size=targets.layout.data.size,
            interleaved=settings.sample_order == "interleaved",
        )
        self._containment = Containment(strict=settings.strict, report=self._record_fault)
        self._observations = Observations(
            progress=self._progress,
            layout=targets.layout,
            detail=settings.detail,
            bounds=settings.bounds,
            containment=self._containment,
            on_full=self._containment.guarded("writer", self._write),
            forced=forced,
            last_seen=last_seen,
            run_on_cpu=settings.run_on_cpu,
        )
        # A replica puts tensors of its own in the place of some of the training's, which are to be of the same class.
        self._out_of_sight = partial(out_of_sight, functions=replica is None)
        self._ending = Ending(self._progress)
        self._final: dict[str, Any] | None = None
        self._writer: StepWriter | None = None
        self._attachment: Attachment | None = None
        self._undo = ExitStack()
        rank, world_size = rank_and_world_size()
        if settings.ranks is not None and rank not in settings.ranks:
            return
        self._run = {
            "world_size": world_size,
            "mesh": targets.layout.to_json(),
            "engine": next(filter(None, (engine.settings(targets.root) for engine in ENGINES)), None),
            "settings": settings.to_json(),
            "forced_by": forced and forced.path,
            "recipe": recipe,
            **describe(),
        }
        open_writer = open_writer or on_disk(path, overwrite=overwrite)
        self._writer = open_writer(self._run, rank, world_size)
        with self._out_of_sight(), ExitStack() as undo:
            undo.callback(self._containment.guarded("writer", self._close_writer, always=True))
            self._attachment = Attachment(
                targets, settings, self._observations, replica=replica,
                before_every_step=before_every_step or forced is not None,
                on_step=self._end_step, on_discovery=self._write_rank, on_schedule=self._follow_pipeline,
                containment=self._containment,
            )  # fmt: skip
            undo.callback(self._attachment.close)
            self._write_rank()
            undo.callback(atexit.unregister, close_at_exit(self, first=self._ending.at_exit))
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self._observations.last_seen = None  # what is observed from here on is not where the training was
        self.ended_by(error)
        self.close()

    def ended_by(self, error: BaseException | None) -> None:
        """Have the recording say that this error has ended the training, or that none has. `close` follows.

        Args:
            error: What has ended it; None where nothing has.
        """
        self._ending.by(error)

    @property
    def step(self) -> int:
        """The step that the training is in, counted from 0."""
        return self._progress.step

    def log(
        self,
        name: str,
        value: float | Tensor,
        *,
        merge: Literal["mean", "sum"] = "mean",
        weight: float | None = None,
    ) -> None:
        """Record a scalar, e.g. a loss or a gradient norm that the training reports.

        Between a step of the optimizer and the next forward pass it belongs to the step that has
        just ended.

        Args:
            name: What it is called in the recording.
            value: A number, or a tensor with one element.
            merge: How the values of several micro-steps, and of several ranks, become one.
            weight: Weight of this value in a mean; the size of the latest batch where left out.

        What is no number is not recorded: the recording says so, and a warning, once for each name.

        Raises:
            ConfigError: `merge` is neither word.
        """
        if merge not in ("mean", "sum"):
            where = f"log({name!r}, merge=...)"
            problem = Problem.unknown_name(where=where, kind="a way to merge", found=str(merge), known=("mean", "sum"))
            raise ConfigError("log(...)", [problem], consequence="the value was not recorded")
        self._containment.guarded("log", self._log)(name, value, merge, weight)

    @property
    def steps(self) -> Mapping[str, int]:
        """How many steps each optimizer has ended, by name, also when the recording has ended."""
        return dict(self._progress.steps)

    @property
    def is_recording(self) -> bool:
        """Whether what is observed is still written."""
        return self._writer is not None and not self._containment.is_disabled("writer")

    @property
    def followed(self) -> Mapping[str, OptimizerTap]:
        """The taps of the optimizers that are followed, by name; none when the recording has ended."""
        return {} if self._attachment is None else self._attachment.followed

    def follow(self, optimizer: Optimizer, *call: Any) -> None:
        """Follow an optimizer that was made after those that were given.

        Args:
            optimizer: It is about to step. If it holds nothing of the models, it is left alone.
            *call: What torch gives a hook on its `step` beside it, if that is known.
        """
        if self._attachment is not None:
            with self._out_of_sight():
                self._attachment.follow(optimizer, *call)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Have only what happens inside this block observed, from the first such block on.

        A training beside this one calls the same functions of torch: what it does belongs to none of this one's steps.
        """
        self._containment.paused = False
        try:
            yield
            if self._attachment is not None:
                self._attachment.settle()
        finally:
            self._containment.paused = True

    def write(self) -> None:
        """Write what was logged since the step ended, which otherwise waits for the step that follows."""
        self._containment.guarded("writer", self._write)()

    def close(self) -> None:
        """Remove every tap, complete the files and let go of the model. Later calls do nothing."""
        self._containment.paused = False
        undo, self._undo = self._undo, ExitStack()
        with self._out_of_sight(), undo:
            if self._attachment is not None:
                self._attachment.finish()
            self._containment.guarded("in_flight", self._observations.settle)()
            self._containment.guarded("writer", self._write)()
            self._containment.guarded("writer", self._describe_end)()
        self._writer = self._attachment = None
        self._progress.observing = False  # for hooks on a graph that outlives this
        self._observations.clear()

    def _follow_pipeline(self, model: nn.Module, schedule: Any, stages: list[Any]) -> None:
        """A pipeline's schedule is about to run a batch: only now is it known how the batch is divided."""
        pipeline = find_pipeline(schedule, stages)
        if self._pipeline == pipeline:
            return
        self._pipeline = pipeline
        layout = self._observations.layout = in_pipeline(self._observations.layout, model, pipeline)
        data = layout.data
        self._progress.data_rank, self._progress.data_size = data.rank, data.size
        if self._writer is not None:
            self._writer.write_run({**self._run, "mesh": self._observations.layout.to_json()})
            self._write_rank()

    def _describe_end(self) -> None:
        if self._attachment is not None:
            self._final = {**self._rank_content(), "ended": self._ending.to_json(self._attachment.followed)}

    def _close_writer(self) -> None:
        assert self._writer is not None
        self._writer.close(self._final)

    def _end_step(self, name: str) -> None:
        if name == self._progress.optimizer:
            self._ending.step_ends()
        self._containment.guarded("in_flight", self._observations.settle)()
        self._containment.guarded("writer", self._write)(name)
        following = self._progress.steps.get(name, 0) + 1
        self._progress.end_step(name, observing=self._settings.records(following) and self.is_recording)

    def _write(self, optimizer: str | None = None) -> None:
        if self._writer is not None:
            for step in self._observations.take(optimizer):
                self._writer.write_step(*step)

    def _write_rank(self) -> None:
        if self._writer is not None and self._attachment is not None:
            self._writer.write_rank(self._rank_content())

    def _rank_content(self) -> dict[str, Any]:
        """Content of `rank.json`, as far as it is known now."""
        assert self._attachment is not None
        not_forced = {} if self._forced is None else {"not_forced": self._forced.not_forced}
        pipeline = {} if self._pipeline is None else {"pipeline": self._pipeline.to_json()}
        run = {
            "world_size": self._run["world_size"],
            "mesh": self._observations.layout.to_json(),
            "pid": os.getpid(),
        }
        return {**self._attachment.describe(), **not_forced, **pipeline, **run}

    def _log(self, given: object, value: object, merge: Merge, weight: object) -> None:
        if self._attachment is not None:
            self._attachment.settle()
        progress = self._progress
        late = not progress.forward_done and progress.batch is None and progress.step > 0
        if not self.is_recording or not self._settings.records(progress.step - late):
            return
        name = logged_name(given)
        call = progress.next_call(name, "logged")
        try:
            number, weighs = _logged(value), float(progress.samples) if weight is None else weight_of(weight)
        except NotLoggedError as error:
            self._observations.unobserved(str(error), phase="loss", path=name, slot="logged", call=call, late=late)
            self._refused.warn(name, str(error))
            return
        self._observations.emit(
            number, phase="loss", path=name, slot="logged", merge=merge, late=late, call=call, weight=weighs
        )

    def _record_fault(self, tap: str, message: str) -> None:
        if tap == "writer":  # nothing more can be written, so nothing more is kept
            self._progress.observing = False
            self._observations.clear()
        else:
            what = NO_REPLICA if tap.startswith(REPLICA) else TAP_FAILED.format(tap=tap)
            self._observations.unobserved(f"{what}: {message}", phase="batch", path=ITSELF, slot=tap)


def _logged(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        return as_tensor(number_of(value))
    if value.is_complex():
        raise NotLoggedError("it is a complex number")
    tensor: Tensor = of_one_element(value.detach())
    return tensor if tensor.is_floating_point() else tensor.double()  # of integers a summary has no sum
