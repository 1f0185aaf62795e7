"""traindiff: a debugger for the numerics of neural-network training.

Record a training with `record`, compare two recordings with `compare`:

    with traindiff.record("runs/base", model, optimizer):
        train(model, optimizer)

    print(traindiff.compare("runs/base", "runs/candidate"))

Importing traindiff imports no framework; comparing needs none.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from traindiff._version import __version__
from traindiff.declared_shard import shard
from traindiff.errors import (
    ConfigError,
    CorruptRecordingError,
    FormatVersionError,
    MixedRecordingError,
    NotARecordingError,
    RecordingError,
    TraindiffError,
    TraindiffWarning,
    UnsupportedTensorError,
)

if TYPE_CHECKING:
    from traindiff.comparison import Comparison, Verification, compare
    from traindiff.findings import Finding
    from traindiff.health import Verdict, check
    from traindiff.recording import Recording, open_recording
    from traindiff.sessions.recipe import Recipe, Training
    from traindiff.sessions.record import record
    from traindiff.sessions.recorder import Recorder
    from traindiff.sessions.verify import calibrate, verify
    from traindiff.taps.inspection import inspect

_LAZY = {
    "Comparison": "traindiff.comparison",
    "Finding": "traindiff.comparison",
    "Recipe": "traindiff.sessions.recipe",
    "Recorder": "traindiff.sessions.recorder",
    "Recording": "traindiff.recording",
    "Training": "traindiff.sessions.recipe",
    "Verdict": "traindiff.health",
    "Verification": "traindiff.comparison",
    "calibrate": "traindiff.sessions.verify",
    "check": "traindiff.health",
    "compare": "traindiff.comparison",
    "inspect": "traindiff.taps.inspection",
    "open_recording": "traindiff.recording",
    "record": "traindiff.sessions.record",
    "verify": "traindiff.sessions.verify",
}
_NEEDS_TORCH = ("traindiff.sessions",)

__all__ = [
    "Comparison",
    "ConfigError",
    "CorruptRecordingError",
    "Finding",
    "FormatVersionError",
    "MixedRecordingError",
    "NotARecordingError",
    "Recipe",
    "Recorder",
    "Recording",
    "RecordingError",
    "TraindiffError",
    "TraindiffWarning",
    "Training",
    "UnsupportedTensorError",
    "Verdict",
    "Verification",
    "__version__",
    "calibrate",
    "check",
    "compare",
    "inspect",
    "open_recording",
    "record",
    "shard",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'traindiff' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module = _LAZY[name]
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


def __dir__() -> list[str]:
    return __all__
