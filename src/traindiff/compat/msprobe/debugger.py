"""`PrecisionDebugger`: monitor the gradients of a training as msprobe does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from traindiff.compat.msprobe.configuration import read_configuration
from traindiff.compat.msprobe.exporting import LiveFiles
from traindiff.compat.msprobe.monitor import monitor_mindspore, monitor_torch, recording_of
from traindiff.core.observation import NO_GRADIENT
from traindiff.errors import ConfigError, Problem, TraindiffWarning, level_of_caller, type_of
from traindiff.observe.common.containers import is_of

if TYPE_CHECKING:
    from mindspore import nn as mindspore_nn
    from torch import nn as torch_nn

    from traindiff.observe.mindspore.recorder import Recorder as MindSporeRecorder
    from traindiff.observe.torch.session.recorder import Recorder as TorchRecorder


NO_STEP = (
    "in the steps that were asked for, no optimizer has stepped that holds parameters of what is monitored, so there "
    "are no files"
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _AlsoOnClass(Generic[_P, _T]):
    """A method that can also be called on the class, as msprobe documents it: then of the debugger made last."""

    def __init__(self, function: Callable[Concatenate[PrecisionDebugger, _P], _T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: PrecisionDebugger | None, owner: type[PrecisionDebugger]) -> Callable[_P, _T]:
        return partial(self._function, owner.made_last() if instance is None else instance)


class PrecisionDebugger:
    """Monitors the gradients that optimizers receive, according to a configuration file of msprobe.

    Args:
        config_path: The file; its `task` is `grad_probe`.
        task: `grad_probe`, instead of the one in the file.
        dump_path: Directory to write to, instead of the one in the file.
        level: Of msprobe's other tasks. It has no effect, as in msprobe.
        model: Of msprobe's other tasks. It has no effect, as in msprobe.
        step: The steps to monitor, instead of those in the file.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong.
    """

    _last: PrecisionDebugger | None = None

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,  # noqa: ARG002
        model: object = None,  # noqa: ARG002
        step: Sequence[int | str] | None = None,
    ) -> None:
        if config_path is None:
            fix = 'Give the path of a JSON file with "task": "grad_probe".'
            raise _refused("PrecisionDebugger(config_path=...)", what="is missing.", fix=fix)
        directory = None if dump_path is None else os.fspath(dump_path)
        steps = list(step) if isinstance(step, (tuple, range)) else step
        self._configuration = read_configuration(os.fspath(config_path), task=task, dump_path=directory, step=steps)
        self._monitored: Any = None
        self._recorder: TorchRecorder | MindSporeRecorder | None = None
        self._files: LiveFiles | None = None
        self._started = False
        self._remember(self)

    @classmethod
    def _remember(cls, made: PrecisionDebugger) -> None:
        cls._last = made

    @classmethod
    def made_last(cls) -> PrecisionDebugger:
        """The debugger that was made last.

        Raises:
            ConfigError: There is none.
        """
        if cls._last is None:
            fix = 'Call PrecisionDebugger("config.json") first.'
            raise _refused("PrecisionDebugger", what="was not made yet.", fix=fix)
        return cls._last

    @_AlsoOnClass
    def monitor(self, model: torch_nn.Module | mindspore_nn.Cell | Sequence[mindspore_nn.Cell]) -> None:
        """Monitor the optimizers of a model of PyTorch, or an optimizer of MindSpore, from the next step on.

        Each optimizer counts its own steps. The files of a step exist when the step has ended. A second call with the
        same object has no effect.

        Args:
            model: Under PyTorch the root module, wrapped or not; under MindSpore the optimizer, or several, before the
                training is compiled.

        Raises:
            ConfigError: The model cannot be observed, a name in `param_list` is not one of its parameters, or the
                directory holds files of another run. Then nothing is attached and nothing is written.
        """
        if self._recorder is not None and self._monitored is model:
            warnings.warn("monitor(...): this is monitored already.", TraindiffWarning, stacklevel=level_of_caller())
            return
        if self._recorder is not None:
            fix = "Call stop() first, or make another PrecisionDebugger with a dump_path of its own."
            raise _refused("monitor(...)", what="comes second: another model is monitored.", fix=fix)
        several = model if isinstance(model, (list, tuple)) else (model,)
        if any(is_of(one, "mindspore") for one in several):
            for one in several:
                _check_optimizer(one)
            self._recorder, self._files = monitor_mindspore(self._configuration, model)
        else:
            _check_model(model)
            self._recorder, self._files = monitor_torch(self._configuration, model)
        self._monitored = model

    @_AlsoOnClass
    def start(self, model: object = None, token_range: object = None) -> None:  # noqa: ARG002
        """Do nothing: msprobe's other tasks begin a step here.

        A script for several tasks calls it before each step, and `stop` and `step` after it. Therefore the next call of
        `stop` does nothing either, and the files are complete when the process ends.
        """
        self._started = True

    @_AlsoOnClass
    def step(self) -> None:
        """Do nothing: msprobe's other tasks end a step here."""

    @_AlsoOnClass
    def stop(self) -> None:
        """End it, and complete the files. Later calls do nothing, and neither does one that follows `start`."""
        if self._started:
            self._started = False
            return
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.close()
        self._monitored = None
        if self._files is not None and recorder.sees_steps and not (self._files.seen or self._files.partial):
            reason = self._files.reason.removeprefix(f"{NO_GRADIENT}: ")
            why = f"in the steps that were asked for, {reason}" if reason else NO_STEP
            warnings.warn(f"stop(): no gradient was seen: {why}.", TraindiffWarning, stacklevel=level_of_caller())
        if self._files is not None and (held := list(self._files.partial)):
            directory = self._configuration.dump_path
            warnings.warn(
                f"This rank holds parts only of {len(held)} parameters ({', '.join(held[:3])}), which are in the "
                "recording. When all ranks have ended, make the files of whole gradients: "
                f"traindiff export msprobe {recording_of(self._configuration)} {directory} --overwrite",
                TraindiffWarning,
                stacklevel=level_of_caller(),
            )


def _check_model(model: object) -> None:
    """Refuse what cannot be observed, with the reason."""
    if is_of(model, "torch.jit"):
        raise _refused(
            "monitor(model=...)",
            what="was made by torch.jit: its parameters are in compiled code, where nothing can be observed.",
            fix="Give the model that was traced or scripted, and train that one.",
        )
    if is_of(model, "torch.optim"):
        raise _refused(
            "monitor(model=...)",
            what=f"is {type_of(model)}: an optimizer does not know the names of parameters.",
            fix="Give the model. Its optimizers are found when they first step.",
        )


def _check_optimizer(optimizer: object) -> None:
    """Refuse what is of MindSpore and no optimizer, whose `parameters` are its own and not a method."""
    if callable(getattr(optimizer, "parameters", len)):
        raise _refused(
            "monitor(...)",
            what=f"is given {type_of(optimizer)} of MindSpore; gradients are seen on their way into an optimizer.",
            fix="Give the optimizer that the training calls, or a list of them.",
        )


def _refused(where: str, *, what: str, fix: str) -> ConfigError:
    problem = Problem(where=where, what=what, fix=fix)
    return ConfigError("PrecisionDebugger", [problem], consequence="nothing was attached to the model")
