"""Record a MindSpore training, to be compared with another one, or with a PyTorch training of the same model.

    with traindiff.mindspore.record("runs/mindspore", net, optimizer) as run:
        train(net, optimizer)

    record          Observe a training, step by step; gives the `Recorder`, with `log`, `step` and `close`.
    Recorder        A recording in progress.

Needs mindspore, and no torch. `traindiff explain mindspore` lists what is observed in each mode.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traindiff.observe.mindspore.record import record
    from traindiff.observe.mindspore.recorder import Recorder

_LAZY = {"Recorder": "traindiff.observe.mindspore.recorder", "record": "traindiff.observe.mindspore.record"}

__all__ = ["Recorder", "record"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(
            f"module 'traindiff.mindspore' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    try:
        found = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "mindspore":
            raise ModuleNotFoundError(
                f"traindiff.mindspore.{name} needs mindspore, which is not installed. "
                "Install it with: pip install 'traindiff[mindspore]'",
                name="mindspore",
            ) from None
        raise
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
