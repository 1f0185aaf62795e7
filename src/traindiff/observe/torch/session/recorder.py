"""A recording of a PyTorch training in progress: its taps, and what they hand over to the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.made_inside import made_inside
from traindiff.core.observation import NO_REPLICA, Observation
from traindiff.core.settings import RecordSettings
from traindiff.observe.common.compacting import check_compacting, compact_beside
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.session import Session
from traindiff.observe.common.user_input import NotLoggedError, number_of, of_one_element
from traindiff.observe.common.writing import OpenWriter, on_disk
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
from traindiff.observe.torch.sharding.data_parallel import Pipeline, find_pipeline
from traindiff.observe.torch.sharding.layout import in_pipeline, with_divisors
from traindiff.observe.torch.sharding.registry import ENGINES


@made_inside
class Recorder(Session[Observations]):
    """A recording in progress. Made by `traindiff.record`; ended by `close` or its `with` block.

    Args:
        path: Directory to write, or the name of the run.
        targets: What is observed.
        settings: What is recorded in which steps.
        overwrite: Replace a recording that is already at `path`.
        replica: Perturbs the training; None for the training as it is.
        forced: Values that replace the observed tensors, if any.
        recipe: Name of the recipe that prepared the training.
        open_writer: Makes the object that takes the steps. Default: one that writes a recording at `path`.
        before_every_step: Record parameters before each step, not only after a step that was not recorded.
        last_seen: Called with each observation.
        first_step: Number of the first step, for a training that continues from a checkpoint.

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
        check_compacting(path, settings)
        layout = targets.layout
        progress = Progress(
            optimizer=targets.primary,
            first_step=first_step,
            observing=settings.records(first_step),
            data_rank=layout.data.rank,
            data_size=layout.data.size,
            interleaved=settings.sample_order == "interleaved",
        )
        self._containment = Containment(strict=settings.strict, report=self._record_fault)
        observations = Observations(
            progress=progress,
            layout=layout,
            settings=settings,
            containment=self._containment,
            on_full=self._containment.guarded("writer", self._write),
            forced=forced,
            last_seen=last_seen,
        )
        super().__init__(path, settings, progress=progress, faults=self._containment, observations=observations)
        self._settle = self._containment.guarded("in_flight", observations.settle)
        self._forced = forced
        self._pipeline: Pipeline | None = None
        self._attachment: Attachment | None = None
        # A replica replaces some of the training's tensors by its own, which must have the same class.
        self._out_of_sight = partial(out_of_sight, functions=replica is None)
        rank, world_size = rank_and_world_size()
        if settings.ranks is not None and rank not in settings.ranks:
            return
        opened = self._open(
            open_writer or on_disk(path, overwrite=overwrite, per_node=settings.per_node), rank, world_size,
            circumstances=describe(), mesh=layout.data.to_json(),
            engine=next(filter(None, (one.settings(targets.root) for one in ENGINES)), None),
            forced_by=None if forced is None else forced.path, recipe=recipe,
        )  # fmt: skip
        with self._out_of_sight(), opened as undo:
            self._attachment = Attachment(
                targets, settings, self._observations, replica=replica,
                before_every_step=before_every_step or forced is not None, set_back=before_every_step,
                on_step=self._end_step, on_discovery=self._write_rank, on_schedule=self._follow_pipeline,
                on_backward=self._read_divisors, on_joined=self._pass_over, containment=self._containment,
            )  # fmt: skip
            undo.callback(self._attachment.close)
        if settings.compact is not None and open_writer is None and rank == min(settings.ranks or (0,)):
            self._containment.guarded("compacting", compact_beside)(path, settings.compact)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self._observations.last_seen = None  # observations made from here on are not where the training was
        super().__exit__(kind, error, where)

    @property
    def steps(self) -> Mapping[str, int]:
        """The number of steps that each optimizer has ended, by name, also after the recording has ended."""
        return dict(self._progress.steps)

    @property
    def followed(self) -> Mapping[str, OptimizerTap]:
        """The taps of the followed optimizers, by name; none after the recording has ended."""
        return {} if self._attachment is None else self._attachment.optimizers.taps

    def follow(self, optimizer: Optimizer, *call: Any) -> None:
        """Follow an optimizer that was made after the given ones and is about to step.

        Args:
            optimizer: Left alone if it holds nothing of the models.
            *call: The further arguments that torch gives a hook on its `step`, if they are known.
        """
        if self._attachment is not None:
            with self._out_of_sight():
                self._attachment.optimizers.follow(optimizer, *call)

    def describe_at_end(self, name: str, value: Callable[[], Any]) -> None:
        """Put a value that is known when the recording ends into `rank.json`.

        Args:
            name: Its key in the format.
            value: Returns it.
        """
        if self._attachment is not None:
            self._attachment.describe_at_end(name, value)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """From the first such block on, observe only what happens inside these blocks.

        A second training in this process calls the same functions of torch; its calls belong to none of these steps.
        """
        self._containment.paused = False
        try:
            yield
            self._catch_up()
        finally:
            self._containment.paused = True

    def write(self) -> None:
        """Write the numbers that were logged since the last step ended, without waiting for the next step."""
        self._containment.guarded("writer", self._write)()

    def close(self) -> None:
        """Remove every tap, complete the files and let go of the model. Later calls do nothing."""
        self._containment.paused = False
        with self._out_of_sight():
            super().close()
        self._attachment = None

    def _follow_pipeline(self, model: nn.Module, schedule: Any, stages: list[Any]) -> None:
        """Read how a pipeline's schedule divides the batch, which is known only when it is about to run one."""
        pipeline = find_pipeline(schedule, stages)
        if self._pipeline == pipeline:
            return
        self._pipeline = pipeline
        layout = self._observations.layout = in_pipeline(self._observations.layout, model, pipeline)
        self._progress.data_rank, self._progress.data_size = layout.data.rank, layout.data.size
        if self._writer is not None:
            self._run["mesh"] = layout.data.to_json()
            self._writer.write_run(self._run)
            self._write_rank()

    def _read_divisors(self) -> None:
        self._observations.layout = with_divisors(self._observations.layout)

    def _pass_over(self, steps: int) -> None:
        """Count steps for which this rank had no inputs as if it had taken them."""
        for name in [*self.followed]:
            for _ in range(steps):
                self._end_step(name)

    def _catch_up(self) -> None:
        if self._attachment is not None:
            self._attachment.catch_up()

    def _finish(self) -> None:
        if self._attachment is not None:
            self._attachment.finish()
        self._settle()

    def _end_step(self, name: str) -> None:
        self._settle()
        super()._end_step(name)

    def _rank_content(self) -> dict[str, Any]:
        if self._attachment is None:
            return {}
        content = self._attachment.describe()
        if self._forced is not None:
            content["not_forced"] = self._forced.not_forced
        if self._pipeline is not None:
            content["pipeline"] = self._pipeline.to_json()
        run = {
            "world_size": self._run["world_size"],
            "mesh": self._run["mesh"],
            "pid": os.getpid(),
        }
        return {**content, **run}

    def _reason_for_fault(self, tap: str) -> str:
        return NO_REPLICA if tap.startswith(REPLICA) else super()._reason_for_fault(tap)

    def _scalar(self, value: object) -> Tensor:
        if not isinstance(value, Tensor):
            return as_tensor(number_of(value))
        if value.is_complex():
            raise NotLoggedError("it is a complex number")
        tensor: Tensor = of_one_element(value.detach())
        return tensor if tensor.is_floating_point() else tensor.double()  # a summary of integers has no sum
