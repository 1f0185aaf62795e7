"""A debugger for the numerics of neural-network training: where, when and on which rank two runs diverge.

Record a training, record a changed version of it, and compare the two recordings:

    with traindiff.record("runs/base", model, optimizer):
        train(model, optimizer)

    print(traindiff.compare("runs/base", "runs/candidate"))

Recording a training, which needs torch:

    record          Observe a training, step by step; returns the `Recorder`, with `log`, `step` and `close`.
    inspect         Observe an intermediate tensor that no module returns.
    shard           Declare which part of a larger tensor each rank holds.

Watching a training, which needs torch:

    watch           Find where the first NaN or infinity is made; returns the `Watcher`, with `close`.
    Origin          The tensor that was first NaN or infinite, and its place.

Judging recordings, which needs no torch:

    compare         Compare two recordings: a `Comparison`, with `verdict`, `first_divergence` and `findings`.
    compact         Merge the ranks of a recording once, into a smaller one: a `Compacted`.
    check           Check one recording by itself: a `Verdict`, with `verdict` and `findings`.
    open_recording  Read the numbers of a recording: a `Recording`.
    weights         Compare saved weights, models or state dicts: a `WeightsComparison`.
    Finding         One judged difference or broken rule, with its evidence.

Running trainings and judging them, which needs torch:

    verify          Run two trainings, compare them, and find the wrong operation: a `Verification`.
    investigate     Find out why two trainings differ, stage by stage, down to the operator: an `Investigation`.
    resume          Save a training, load it in fresh processes, train on: a `Resumption`.
    calibrate       Run one training, and the perturbed runs that measure its noise.
    Lockstep        Train two engines side by side and compare them step by step: a `Comparison`.
    Setup           How a training is run: engine, dtype, ranks and so on.
    Recipe          A function that prepares a training from scratch and returns a `Training`.

Errors; `ConfigError` is the one about what the user wrote:

    TraindiffError
        ConfigError             A setting, or a combination of settings, cannot be used.
        RecordingError          A recording cannot be used.
            NotARecordingError      The path has no recording.
            CorruptRecordingError   The recording is damaged.
            MixedRecordingError     Its ranks belong to different runs.
            FormatVersionError      A newer traindiff wrote it.
            LostFilesError          Its files were moved, deleted or cut short while they were written.
        CheckpointError         Saved weights cannot be used.
        WorkerError             Processes that read parts of a recording died again and again.
        LockstepError           The ranks, or the sides, of a lockstep cannot continue together.
        NonFiniteError          A watched training has made its first NaN or infinity.
        StoppedError            A watched training has reached the step after which it should stop.
        NotPerturbedError       A part of a replica's training ran where it cannot be perturbed.
        UnsupportedTensorError  A tensor has no readable elements.
    TraindiffWarning            Something could not be observed; the training continues.

The command `traindiff` does the same; `traindiff --version` prints `__version__`. Importing traindiff imports
no framework.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from traindiff._version import __version__
from traindiff.core.shards import shard
from traindiff.errors import (
    CheckpointError,
    ConfigError,
    CorruptRecordingError,
    FormatVersionError,
    LockstepError,
    LostFilesError,
    MixedRecordingError,
    NonFiniteError,
    NotARecordingError,
    NotPerturbedError,
    RecordingError,
    StoppedError,
    TraindiffError,
    TraindiffWarning,
    UnsupportedTensorError,
    WorkerError,
)

if TYPE_CHECKING:
    from traindiff.analyse.check import Verdict, check
    from traindiff.analyse.compact import Compacted, compact
    from traindiff.analyse.compare import Comparison, Verification, compare
    from traindiff.analyse.compare.investigation import Investigation
    from traindiff.analyse.compare.resumption import Resumption
    from traindiff.analyse.findings import Finding
    from traindiff.observe.torch.hooks.inspect import inspect
    from traindiff.observe.torch.nonfinite.origin import Origin
    from traindiff.observe.torch.nonfinite.watch import watch
    from traindiff.observe.torch.nonfinite.watcher import Watcher
    from traindiff.observe.torch.session.record import record
    from traindiff.observe.torch.session.recorder import Recorder
    from traindiff.run.config.setup import Setup
    from traindiff.run.config.training import Training
    from traindiff.run.lockstep.lockstep import Lockstep
    from traindiff.run.resume.resume import resume
    from traindiff.run.verify.investigate import investigate
    from traindiff.run.verify.recipe import Recipe
    from traindiff.run.verify.verify import calibrate, verify
    from traindiff.state.comparing import weights
    from traindiff.state.comparison import WeightsComparison
    from traindiff.storage import Recording, open_recording

_LAZY = {
    "Compacted": "traindiff.analyse.compact",
    "Comparison": "traindiff.analyse.compare",
    "Finding": "traindiff.analyse.compare",
    "Investigation": "traindiff.analyse.compare.investigation",
    "Lockstep": "traindiff.run.lockstep.lockstep",
    "Origin": "traindiff.observe.torch.nonfinite.origin",
    "Recipe": "traindiff.run.verify.recipe",
    "Recorder": "traindiff.observe.torch.session.recorder",
    "Recording": "traindiff.storage",
    "Resumption": "traindiff.analyse.compare.resumption",
    "Setup": "traindiff.run.config.setup",
    "Training": "traindiff.run.config.training",
    "Verdict": "traindiff.analyse.check",
    "Verification": "traindiff.analyse.compare",
    "Watcher": "traindiff.observe.torch.nonfinite.watcher",
    "WeightsComparison": "traindiff.state.comparison",
    "calibrate": "traindiff.run.verify.verify",
    "check": "traindiff.analyse.check",
    "compact": "traindiff.analyse.compact",
    "compare": "traindiff.analyse.compare",
    "inspect": "traindiff.observe.torch.hooks.inspect",
    "investigate": "traindiff.run.verify.investigate",
    "open_recording": "traindiff.storage",
    "record": "traindiff.observe.torch.session.record",
    "resume": "traindiff.run.resume.resume",
    "verify": "traindiff.run.verify.verify",
    "watch": "traindiff.observe.torch.nonfinite.watch",
    "weights": "traindiff.state.comparing",
}
_OLDEST_TORCH = (2, 4)
_NEEDS_TORCH = ("traindiff.observe.torch.session", "traindiff.run.lockstep", "traindiff.observe.torch.nonfinite")

__all__ = [
    "CheckpointError",
    "Compacted",
    "Comparison",
    "ConfigError",
    "CorruptRecordingError",
    "Finding",
    "FormatVersionError",
    "Investigation",
    "Lockstep",
    "LockstepError",
    "LostFilesError",
    "MixedRecordingError",
    "NonFiniteError",
    "NotARecordingError",
    "NotPerturbedError",
    "Origin",
    "Recipe",
    "Recorder",
    "Recording",
    "RecordingError",
    "Resumption",
    "Setup",
    "StoppedError",
    "TraindiffError",
    "TraindiffWarning",
    "Training",
    "UnsupportedTensorError",
    "Verdict",
    "Verification",
    "Watcher",
    "WeightsComparison",
    "WorkerError",
    "__version__",
    "calibrate",
    "check",
    "compact",
    "compare",
    "inspect",
    "investigate",
    "open_recording",
    "record",
    "resume",
    "shard",
    "verify",
    "watch",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'traindiff' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module = _LAZY[name]
    if module.startswith(_NEEDS_TORCH):
        _check_torch(name)
    try:
        found = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name == "torch" and module.startswith(_NEEDS_TORCH):
            raise ModuleNotFoundError(
                f"traindiff.{name} needs torch, which is not installed. "
                "Install it with: pip install 'traindiff[torch]'",
                name="torch",
            ) from None
        raise
    globals()[name] = found
    return found


def _check_torch(name: str) -> None:
    """Refuse a torch that is too old, before anything fails in the middle of it."""
    try:
        from torch import __version__ as found
    except ModuleNotFoundError:
        return  # said where it is needed
    from traindiff.errors import Problem

    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        problem = Problem(
            where=f"traindiff.{name}",
            what=f"needs torch {oldest} or later to observe with; this is torch {found}.",
            fix=f"Install torch {oldest} or later, or record activations and their gradients with "
            "traindiff.compat.onnxruntime.StatisticsSubscriber, which works from torch 1.13 on "
            "(traindiff explain activations).",
        )
        raise ConfigError("traindiff", [problem], consequence="nothing was attached to the model")


def __dir__() -> list[str]:
    return __all__
