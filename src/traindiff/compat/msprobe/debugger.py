"""`PrecisionDebugger`: monitor the gradients of a training as msprobe does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from traindiff.compat.msprobe.configuration import read_configuration
from traindiff.compat.msprobe.exporting import LiveFiles
from traindiff.compat.msprobe.monitor import monitor_mindspore, monitor_torch, recording_of
from traindiff.errors import ConfigError, Problem, TraindiffWarning, type_of
from traindiff.observe.common.containers import is_of

if TYPE_CHECKING:
    from mindspore import nn as mindspore_nn
    from torch import nn as torch_nn

    from traindiff.observe.mindspore.recorder import Recorder as MindSporeRecorder
    from traindiff.observe.torch.session.recorder import Recorder as TorchRecorder


class PrecisionDebugger:
    """Monitors the gradients that optimizers receive, according to a configuration file of msprobe.

    Args:
        config_path: The file; its `task` is `grad_probe`.
        dump_path: Directory to write to, instead of the one in the file.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong.
    """

    def __init__(self, config_path: str | os.PathLike[str], *, dump_path: str | os.PathLike[str] | None = None) -> None:
        found = read_configuration(os.fspath(config_path))
        self._configuration = found if dump_path is None else replace(found, dump_path=os.fspath(dump_path))
        self._monitored: Any = None
        self._recorder: TorchRecorder | MindSporeRecorder | None = None
        self._files: LiveFiles | None = None

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
            warnings.warn("monitor(...): this is monitored already.", TraindiffWarning, stacklevel=2)
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

    def stop(self) -> None:
        """End it, and complete the files. Later calls do nothing."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.close()
        self._monitored = None
        if self._files is not None and not self._files.seen:
            warnings.warn(
                "stop(): no gradient was seen, so there are no files: in the steps that were asked for, no optimizer "
                "has stepped that holds parameters of what is monitored.",
                TraindiffWarning,
                stacklevel=2,
            )
        if self._files is not None and (partial := list(self._files.partial)):
            directory = self._configuration.dump_path
            warnings.warn(
                f"This rank holds parts only of {len(partial)} parameters ({', '.join(partial[:3])}), which are in the "
                "recording. When all ranks have ended, make the files of whole gradients: "
                f"traindiff export msprobe {recording_of(self._configuration)} {directory} --overwrite",
                TraindiffWarning,
                stacklevel=2,
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
