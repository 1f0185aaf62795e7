"""A recording of a MindSpore training in progress: its taps, what they hand over, and the files it goes into."""

from __future__ import annotations

import atexit
import os
from collections.abc import Collection
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from traindiff.core.observation import ITSELF, TAP_FAILED
from traindiff.core.settings import RecordSettings
from traindiff.errors import ConfigError, Problem, TraindiffError
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.circumstances import Ending, close_at_exit
from traindiff.observe.common.faults import Faults
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.user_input import (
    NotLoggedError,
    RefusedLogs,
    logged_name,
    number_of,
    of_one_element,
    weight_of,
)
from traindiff.observe.common.writing import Follower, StepWriter, on_disk
from traindiff.observe.mindspore.compiled_steps import CompiledSteps
from traindiff.observe.mindspore.environment import describe, mesh, rank_and_world_size
from traindiff.observe.mindspore.forward_pass import ForwardPass
from traindiff.observe.mindspore.observations import Observations, as_real, elements, read
from traindiff.observe.mindspore.step_tap import TAP, DirectSteps, StepTap
from traindiff.observe.mindspore.targets import Targets

UNSEEN_STEPS = (
    "the parameters of {names} have changed, and no step was seen: what calls it was compiled before it was "
    "observed. Call record(...), or monitor(...), before the first call of what mindspore.jit has decorated, or of "
    "Model.train"
)


class UnseenStepsError(TraindiffError):
    """Steps were taken where nothing of them could be seen."""


class Unseen:
    """Remembers the bits of the parameters of each optimizer.

    Args:
        targets: What is observed.
    """

    def __init__(self, targets: Targets) -> None:
        self._held = {one.name: [sight.parameter for sight in one.after] for one in targets.optimizers}
        self._bits = {name: self._read(name) for name in self._held}

    def look(self, *, without: Collection[str]) -> None:
        """Look whether parameters or state have changed that no step is known of.

        Args:
            without: Names of optimizers of which steps are known.

        Raises:
            UnseenStepsError: They have.
        """
        names = [name for name, bits in self._bits.items() if name not in without and bits != self._read(name)]
        if names:
            raise UnseenStepsError(UNSEEN_STEPS.format(names=" and ".join(names)))

    def _read(self, name: str) -> list[int]:
        return [hash(elements(as_real(read(parameter))).bits.tobytes()) for parameter in self._held[name]]


class Recorder:
    """A recording in progress. Made by `traindiff.mindspore.record`; ended by `close` or its `with` block.

    Args:
        path: Directory to write.
        targets: What is observed.
        settings: How.
        overwrite: Replace a recording that is already at `path`.
        follower: Given each step that was written, if there is one.

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
        follower: Follower | None = None,
    ) -> None:
        self.path = path
        self._settings = settings
        rank, world_size = rank_and_world_size()
        divided = mesh(world_size)
        recorded = settings.ranks is None or rank in settings.ranks
        self._progress = Progress(
            optimizer=targets.optimizers[0].name, observing=recorded and settings.records(0), data_rank=rank,
            data_size=world_size,
        )  # fmt: skip
        self._faults = Faults(strict=settings.strict, report=self._record_fault)
        self._observations = Observations(
            progress=self._progress, detail=settings.detail, bounds=settings.bounds, on_full=self._write_contained
        )
        self._logged: dict[str, int] = {}
        self._refused = RefusedLogs()
        self._ending = Ending(self._progress)
        self._content: dict[str, Any] = {}
        self._final: dict[str, Any] | None = None
        self._writer: StepWriter | None = None
        self._forward: ForwardPass | None = None
        self._undo = ExitStack()
        self._steps: list[StepTap] = []
        self._compiled: list[CompiledSteps] = []
        self._unseen: Unseen | None = None
        if not recorded:
            return
        self._unseen = Unseen(targets)
        # An update is the difference of two observations of a parameter.
        observe = settings.observe | ({"param"} if "update" in settings.observe else frozenset())
        self._steps = [
            StepTap(followed, observe=observe, selects=targets.selects, sink=self._observations, on_end=self._end_step)
            for followed in targets.optimizers
        ]
        self._compiled = [CompiledSteps(tap, self._faults) for tap in self._steps]
        run = {
            "world_size": world_size, "mesh": divided, "engine": None, "settings": settings.to_json(),
            "forced_by": None, "recipe": None, **describe(),
        }  # fmt: skip
        self._writer = writer = on_disk(path, overwrite=overwrite, follower=follower)(run, rank, world_size)
        with ExitStack() as undo:
            undo.callback(self._faults.run, "writer", lambda: writer.close(self._final), always=True)
            if targets.root is not None:
                self._forward = ForwardPass(
                    targets.cells, targets.root, observe=observe, batch_axis=BatchAxis(settings.batch_axis),
                    sink=self._observations, faults=self._faults, before_forward=self._before_forward,
                )  # fmt: skip
                undo.enter_context(self._forward.attach())
            for tap, compiled in zip(self._steps, self._compiled, strict=True):
                undo.enter_context(compiled.attach())
                direct = DirectSteps(tap, before_step=self._before_step, faults=self._faults, pause=compiled.pause)
                undo.enter_context(direct.attach())
            self._content = {**targets.describe(), "world_size": world_size, "mesh": divided, "pid": os.getpid()}
            writer.write_rank(self._content)
            undo.callback(atexit.unregister, close_at_exit(self, first=self._ending.at_exit))
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ending.by(error)
        self.close()

    @property
    def step(self) -> int:
        """The step that the training is in, counted from 0; waits for a graph that is running."""
        self._settle()
        return self._progress.step

    def log(
        self, name: str, value: Any, *, merge: Literal["mean", "sum"] = "mean", weight: float | None = None
    ) -> None:
        """Record a scalar, e.g. a loss that the training reports.

        Between a step of the optimizer and the next forward pass that is seen it belongs to the step that has
        just ended, unless one of that name has been recorded there.

        Args:
            name: What it is called in the recording.
            value: A number, or a tensor with one element.
            merge: How the values of several micro-steps become one.
            weight: Weight of this value in a mean; the size of the latest batch where left out.

        What is no number is not recorded: the recording says so, and a warning, once for each name.

        Raises:
            ConfigError: `merge` is neither word.
        """
        if merge not in ("mean", "sum"):
            where = f"log({name!r}, merge=...)"
            problem = Problem.unknown_name(where=where, kind="a way to merge", found=str(merge), known=("mean", "sum"))
            raise ConfigError("log(...)", [problem], consequence="the value was not recorded")
        self._faults.run("log", lambda: self._log(name, value, merge, weight))

    def close(self) -> None:
        """Remove every tap, complete the files and let go of the model. Later calls do nothing."""
        undo, self._undo = self._undo, ExitStack()
        with undo:
            if self._writer is not None:
                self._settle()
                self._look_for_unseen_steps()
                self._write_contained()
                optimizers = [tap.followed.name for tap in self._steps]
                self._final = {**self._content, "ended": self._ending.to_json(optimizers)}
        self._writer = None
        self._forward = None
        self._steps.clear()
        self._compiled.clear()
        self._unseen = None
        self._progress.observing = False
        self._observations.clear()

    def _settle(self) -> None:
        for compiled in self._compiled:
            self._faults.run(TAP, compiled.settle)

    def _before_forward(self) -> None:
        self._settle()
        self._faults.run(TAP, self._before_step)

    def _before_step(self) -> None:
        """Record parameters as the first optimizer's step finds them, unless that is done or known."""
        tap = self._steps[0]
        if tap.begin():
            for sight in tap.followed.before:
                tap.sight(sight, read(sight.parameter))

    def _end_step(self, name: str) -> None:
        primary = name == self._progress.optimizer
        if primary:
            self._ending.step_ends()
        with self._observations.lock:
            if primary and self._forward is not None:
                self._faults.run("module_outputs", self._forward.end_step)
            self._write_contained(name)
            following = self._progress.steps.get(name, 0) + 1
            self._progress.end_step(name, observing=self._settings.records(following) and self._is_recording)

    @property
    def _is_recording(self) -> bool:
        return self._writer is not None and not self._faults.is_disabled("writer")

    def _write_contained(self, optimizer: str | None = None) -> None:
        self._faults.run("writer", lambda: self._write(optimizer))

    def _write(self, optimizer: str | None) -> None:
        if self._writer is not None:
            for step in self._observations.take(optimizer):
                self._writer.write_step(*step)

    def _log(self, given: object, value: Any, merge: Literal["mean", "sum"], weight: object) -> None:
        name = logged_name(given)
        self._settle()
        self._look_for_unseen_steps()
        progress = self._progress
        between = not progress.forward_done and progress.batch is None and progress.step > 0
        late = between and self._logged.get(name) != progress.step - 1
        step = progress.step - late
        self._logged[name] = step
        if not self._is_recording or not self._settings.records(step):
            return
        call = progress.next_call(name, "logged")
        try:
            number = _logged(value)
            weighs = float(progress.samples) if weight is None else weight_of(weight)
        except NotLoggedError as error:
            self._observations.unobserved(str(error), phase="loss", path=name, slot="logged", call=call, late=late)
            self._refused.warn(name, str(error))
            return
        self._observations.emit(
            number, phase="loss", path=name, slot="logged", merge=merge, late=late, call=call, weight=weighs
        )

    def _look_for_unseen_steps(self) -> None:
        """Disable what observes steps where parameters have changed, and no step was seen."""
        taken = {tap.followed.name for tap in self._steps if tap.steps}
        unseen = self._unseen
        if unseen is not None and len(taken) < len(self._steps) and not self._faults.is_disabled(TAP):
            self._faults.run(TAP, lambda: unseen.look(without=taken))

    def _record_fault(self, tap: str, message: str) -> None:
        if tap == "writer":  # nothing more can be written, so nothing more is kept
            self._progress.observing = False
            self._observations.clear()
        else:
            what = TAP_FAILED.format(tap=tap)
            self._observations.unobserved(f"{what}: {message}", phase="batch", path=ITSELF, slot=tap)


def _logged(value: Any) -> Any:
    if not hasattr(value, "asnumpy"):
        return np.asarray(number_of(value))
    return of_one_element(np.asarray(read(value)))
