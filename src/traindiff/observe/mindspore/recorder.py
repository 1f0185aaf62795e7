"""A recording of a MindSpore training in progress: its taps, and what they hand over to the files."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import communication
from numpy.typing import NDArray

from traindiff.core.made_inside import made_inside
from traindiff.core.settings import RecordSettings
from traindiff.errors import ConfigError, Problem, TraindiffError
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.circumstances import circumstances, variables
from traindiff.observe.common.faults import Faults
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.session import Session
from traindiff.observe.common.user_input import number_of, of_one_element
from traindiff.observe.common.writing import StepListener, on_disk
from traindiff.observe.mindspore.compiled_steps import CompiledSteps
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
    """Parameters changed, and no step was seen."""


class UnseenSteps:
    """Remembers the bits of each optimizer's parameters and state, to notice steps that nothing has seen.

    Args:
        targets: What is observed.
    """

    def __init__(self, targets: Targets) -> None:
        self._held = {one.name: [sight.parameter for sight in one.after] for one in targets.optimizers}
        self._bits = {name: self._read(name) for name in self._held}

    def look(self, *, without: Collection[str]) -> None:
        """Compare the bits of all optimizers but those `without`, whose steps are known.

        Raises:
            UnseenStepsError: Some have changed.
        """
        names = [name for name, bits in self._bits.items() if name not in without and bits != self._read(name)]
        if names:
            raise UnseenStepsError(UNSEEN_STEPS.format(names=" and ".join(names)))

    def _read(self, name: str) -> list[int]:
        return [hash(elements(as_real(read(parameter))).bits.tobytes()) for parameter in self._held[name]]


@made_inside
class Recorder(Session[Observations]):
    """A recording in progress. Made by `traindiff.mindspore.record`; ended by `close` or its `with` block.

    Args:
        path: Directory to write.
        targets: What is observed.
        settings: What is recorded in which steps.
        overwrite: Replace a recording that is already at `path`.
        listener: Given each step that was written, if there is one.

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
        listener: StepListener | None = None,
    ) -> None:
        rank, world_size = rank_and_world_size()
        divided = mesh(world_size)
        recorded = settings.ranks is None or rank in settings.ranks
        progress = Progress(
            optimizer=targets.optimizers[0].name, observing=recorded and settings.records(0), data_rank=rank,
            data_size=world_size,
        )  # fmt: skip
        faults = Faults(strict=settings.strict, report=self._record_fault)
        observations = Observations(
            progress=progress, detail=settings.detail, bounds=settings.bounds,
            on_full=faults.guarded("writer", self._write),
        )  # fmt: skip
        super().__init__(path, settings, progress=progress, faults=faults, observations=observations)
        self._logged: dict[str, int] = {}  # the step under which each name was logged last
        self._content: dict[str, Any] = {}
        self._forward: ForwardPass | None = None
        self._steps: list[StepTap] = []
        self._compiled: list[CompiledSteps] = []
        self._unseen: UnseenSteps | None = None
        if not recorded:
            return
        self._unseen = UnseenSteps(targets)
        # An update is the difference of two observations of a parameter.
        observe = settings.observe | ({"param"} if "update" in settings.observe else frozenset())
        self._steps = [
            StepTap(followed, observe=observe, selects=targets.selects, sink=observations, on_end=self._end_step)
            for followed in targets.optimizers
        ]
        self._compiled = [CompiledSteps(tap, faults) for tap in self._steps]
        open_writer = on_disk(path, overwrite=overwrite, listener=listener)
        with self._open(open_writer, rank, world_size, circumstances=describe(), mesh=divided) as undo:
            if targets.root is not None:
                self._forward = ForwardPass(
                    targets.cells, targets.root, observe=observe, batch_axis=BatchAxis(settings.batch_axis),
                    sink=observations, faults=faults, before_forward=self._before_forward,
                )  # fmt: skip
                undo.enter_context(self._forward.attach())
            for tap, compiled in zip(self._steps, self._compiled, strict=True):
                undo.enter_context(compiled.attach())
                direct = DirectSteps(
                    tap, before_step=self._before_step, faults=faults, pause=compiled.pause, resume=compiled.resume
                )
                undo.enter_context(direct.attach())
            self._content = {**targets.describe(), "world_size": world_size, "mesh": divided, "pid": os.getpid()}

    @property
    def step(self) -> int:
        """The current step of the training, counted from 0; waits for a graph that is running."""
        self._settle()
        return self._progress.step

    def close(self) -> None:
        """Remove every tap, complete the files and let go of the model. Later calls do nothing."""
        super().close()
        self._forward = None
        self._steps.clear()
        self._compiled.clear()
        self._unseen = None

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
        with self._observations.lock:
            if name == self._progress.optimizer and self._forward is not None:
                self._faults.run("module_outputs", self._forward.end_step)
            super()._end_step(name)

    def _catch_up(self) -> None:
        """End the steps of graphs that are running, and notice steps that nothing has seen."""
        self._settle()
        taken = {tap.followed.name for tap in self._steps if tap.steps}
        if self._unseen is not None and len(taken) < len(self._steps) and not self._faults.is_disabled(TAP):
            self._faults.run(TAP, partial(self._unseen.look, without=taken))

    def _finish(self) -> None:
        self._catch_up()

    def _rank_content(self) -> dict[str, Any]:
        return self._content

    def _is_late(self, name: str) -> bool:
        """As of any session, unless that step has this name already: not every forward pass is seen."""
        step = self._progress.step
        late = super()._is_late(name) and self._logged.get(name) != step - 1
        self._logged[name] = step - late
        return late

    def _scalar(self, value: Any) -> NDArray[Any]:
        if not hasattr(value, "asnumpy"):
            return np.asarray(number_of(value))
        array: NDArray[Any] = of_one_element(np.asarray(read(value)))
        return array


ALONE = "by hand"
"""The engine of a run that divides the batch without telling MindSpore."""

_WHOLE = ("stand_alone", "data_parallel")
"""Parallel modes in which each rank holds whole tensors."""

GRAPH = "graph"
PYNATIVE = "pynative"

_VARIABLES = ("ASCEND_", "DEVICE_", "GLOG_", "HCCL_", "MS_", "OMP_", "RANK_")


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks: of the communication group, or as the launcher has set them."""
    if communication.GlobalComm.INITED:
        return communication.get_rank(), communication.get_group_size()
    return int(os.environ.get("RANK_ID", "0")), int(os.environ.get("RANK_SIZE", "1"))


def mesh(world_size: int) -> dict[str, Any] | None:
    """How the batch is divided, for `run.json`; None for a single process.

    Raises:
        ConfigError: MindSpore divides parameters, and does not say how.
    """
    if world_size == 1:
        return None
    way = str(mindspore.get_auto_parallel_context("parallel_mode"))
    if way in _WHOLE:
        return {"data_parallel": world_size, "engine": ALONE if way == "stand_alone" else way}
    problem = Problem(
        where=f"record(...) in the parallel mode {way}",
        what="cannot tell which parts of its tensors a rank holds.",
        fix=f"Train in one of: {', '.join(_WHOLE)}.",
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


def mode() -> str:
    """`graph` where calls of cells are compiled as a whole, else `pynative`."""
    return GRAPH if mindspore.get_context("mode") == mindspore.GRAPH_MODE else PYNATIVE


def describe() -> dict[str, Any]:
    """Circumstances that can change a run's numbers, as JSON values. Reads, never computes on a device."""
    environment = {
        "framework": "mindspore",
        "mode": mode(),
        "devices": [str(mindspore.get_context("device_target"))],
        "variables": variables(_VARIABLES),
    }
    return circumstances(packages=("mindspore", "numpy"), environment=environment)
