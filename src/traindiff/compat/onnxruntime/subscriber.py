"""`StatisticsSubscriber`: a file for every activation, and for its gradient, in every step."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from traindiff.compat.imported import check_room
from traindiff.compat.onnxruntime.kept_recording import KeptRecording, measured
from traindiff.compat.onnxruntime.run_context import SubscriberBase
from traindiff.compat.onnxruntime.statistics import (
    ORDER,
    Direction,
    called,
    dump,
    order_of,
    rank_directory,
    statistics_file,
    step_directory,
    steps_in,
)
from traindiff.core.kernels.registry import PUT_OFF
from traindiff.core.kernels.store import SummaryStore
from traindiff.errors import NotARecordingError, TraindiffWarning, UnsupportedTensorError, level_of_caller
from traindiff.observe.torch.session.environment import rank_and_world_size

if TYPE_CHECKING:
    from traindiff.compat.onnxruntime.manager import Model

RECORDING = "recording"
"""Name of the recording in the directory of the files."""


class StatisticsSubscriber(SubscriberBase):
    """Writes statistics of every activation, and of its gradient, as that of ONNX Runtime does.

    Numbers are right where the original's are not: standard deviations, bfloat16, float16, empty tensors. A module that
    is called several times has a file for each call. Of several ranks each writes into a directory of its own. Beside
    the files stands a recording, which `traindiff compare` reads.

    An error in here ends the statistics and not the training: it warns once.

    Args:
        output_dir: Directory to write.
        start_step: The first step that is written; a step is a forward pass of the model.
        end_step: The step before which writing ends.
        override_output_dir: Replace files of an earlier run that are there. Nothing else is ever removed.
        run_on_cpu: Summarize what is on another device on the CPU, part by part.
        bucket_size: Taken, and of no effect: memory does not grow with a tensor.

    Raises:
        OutputExistsError: The directory is there, and is not to be replaced, or holds other things than an earlier run.
        ConfigError: No step lies between the two.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,  # noqa: FBT001, FBT002  the original's signature
        run_on_cpu: bool = False,  # noqa: FBT001, FBT002
        bucket_size: int = 1024 * 1024 * 1024 // 2,  # noqa: ARG002
    ) -> None:
        super().__init__(start_step, end_step)
        self._rank, self._world_size = rank_and_world_size()
        directory = rank_directory(Path(output_dir), self._rank, self._world_size)
        _check_room(directory, overwrite=override_output_dir)
        self._directory = directory.absolute()  # a training may go to another one
        self._recorded_in = Path(output_dir, RECORDING).absolute()
        self._overwrite = override_output_dir
        self._has_directory = False
        self._summaries = SummaryStore(()) if run_on_cpu else SummaryStore(PUT_OFF)
        self._recording: KeptRecording | None = None
        self._lock = threading.Lock()  # an exported graph runs on threads of its own
        self._failed = False

    def begin(self, model: Model) -> None:
        """See `SubscriberBase`."""
        self._recording = KeptRecording(
            str(self._recorded_in), model, rank=self._rank, world_size=self._world_size, overwrite=self._overwrite
        )
        if self._overwrite:
            for step in _check_room(self._directory, overwrite=True):  # nothing stands in the way any more
                shutil.rmtree(step)
        self._make_directory()

    def saw(self, tensor: Tensor, *, name: str, depth: int, step: int, call: int, forward: bool) -> None:
        """See `SubscriberBase`."""
        with self._lock:
            if self._failed:
                return
            try:
                self._saw(tensor, name=name, depth=depth, step=step, call=call, forward=forward)
            except Exception as error:  # noqa: BLE001  whatever it is, the training goes on
                self._failed = True
                reason = f"{name} of step {step} could not be written ({type(error).__name__}: {error})"
                if self._recording is not None:
                    self._recording.give_up(reason, step=step)
                message = (
                    f"StatisticsSubscriber: {reason}. From here on no statistics are; the training goes on. "
                    "Give an output_dir where you may write and there is room, and keep it until the training ends."
                )
                warnings.warn(message, TraindiffWarning, stacklevel=level_of_caller())

    def _saw(self, tensor: Tensor, *, name: str, depth: int, step: int, call: int, forward: bool) -> None:
        direction: Direction = "forward" if forward else "backward"
        own = called(name, call)
        try:
            statistics, summary = measured(tensor, self._summaries, name=own, direction=direction, depth=depth)
        except UnsupportedTensorError as error:
            if self._recording is not None:
                self._recording.keep(tensor, None, name=name, step=step, call=call, phase=direction, why=str(error))
            return
        if not self._has_directory:
            self._make_directory()  # it follows no model; somebody else calls it
        folder = step_directory(self._directory, step)
        folder.mkdir(exist_ok=True)  # not its parents: a directory that was removed ends the statistics
        file = statistics_file(own, direction)
        with (folder / ORDER).open("a", encoding="utf-8") as order:
            order.write(f"{file}\n")
        (folder / file).write_text(dump(statistics), encoding="utf-8")
        if self._recording is not None:
            self._recording.keep(tensor, summary, name=name, step=step, call=call, phase=direction)

    def _make_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._has_directory = True

    def module_post_forward_impl(self, activation: Tensor, depth: int, name: str, step: int) -> None:
        """What the original calls with an activation."""
        self.saw(activation, name=name, depth=depth, step=step, call=0, forward=True)

    def module_pre_backward_impl(self, activation: Tensor, depth: int, name: str, step: int) -> None:
        """What the original calls with the gradient of an activation."""
        self.saw(activation, name=name, depth=depth, step=step, call=0, forward=False)

    def close(self) -> None:
        """See `SubscriberBase`."""
        with self._lock:
            recording, self._recording = self._recording, None
            if recording is None:
                return
            try:
                recording.close()
            except Exception as error:  # noqa: BLE001  what comes next, another training or the end, goes on
                message = (
                    f"StatisticsSubscriber: the recording {self._recorded_in} could not be completed: {error} "
                    "Keep output_dir until GlobalSubscriberManager.unsubscribe() has been called."
                )
                warnings.warn(message, TraindiffWarning, stacklevel=level_of_caller())


def _check_room(directory: Path, *, overwrite: bool) -> list[Path]:
    """Directories of the steps of an earlier run, which may be removed: they hold nothing but its files.

    Args:
        directory: Of a rank; may not exist.
        overwrite: They are to be replaced. Directories that hold anything else are refused all the same.

    Raises:
        OutputExistsError: It is a file, or holds what must not be removed, or is there and is not to be replaced.
    """
    steps = list(steps_in(directory).values())
    known = {*steps, directory / RECORDING}
    other = sorted(one.name for one in directory.iterdir() if one not in known) if directory.is_dir() else []
    other += [name for one in steps for name in _others(one)]
    there = f"holds statistics of another run ({len(steps)} steps)" if steps else "exists" * directory.exists()
    check_room(
        directory, source="StatisticsSubscriber", where=f"StatisticsSubscriber(output_dir={str(directory)!r})",
        content="statistics of activations", other=other, earlier="" if overwrite else there,
        fix="Give another path, or override_output_dir=True to replace what an earlier run wrote.",
    )  # fmt: skip
    return steps


def _others(step: Path) -> list[str]:
    """Files in the directory of a step that its order does not name."""
    if step.is_symlink() or not (step / ORDER).is_file():
        return [f"{step.name} without {ORDER}"]
    try:
        known = {ORDER, *order_of(step)}
    except NotARecordingError:
        return [f"{step.name}/{ORDER}"]
    return sorted(f"{step.name}/{one.name}" for one in step.iterdir() if one.name not in known or one.is_dir())
