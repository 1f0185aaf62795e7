"""The convergence tools of `onnxruntime.training.utils.hooks`, under their names, with their arguments and files.

```python
from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber

GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir="pt_out", override_output_dir=True)])
```

The model is one of PyTorch's, or the one in an ORTModule; see `traindiff explain activations`. Needs torch 1.13 or
later, and nothing of ONNX Runtime unless there is an ORTModule.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traindiff.compat.onnxruntime.inspecting import _InspectActivation
    from traindiff.compat.onnxruntime.manager import GlobalSubscriberManager, SubscriberManager, inspect_activation
    from traindiff.compat.onnxruntime.run_context import SubscriberBase
    from traindiff.compat.onnxruntime.subscriber import StatisticsSubscriber

_LAZY = {
    "GlobalSubscriberManager": "manager",
    "StatisticsSubscriber": "subscriber",
    "SubscriberBase": "run_context",
    "SubscriberManager": "manager",
    "_InspectActivation": "inspecting",
    "inspect_activation": "manager",
}
"""Names of this module by the modules beside it: torch is not needed to read files."""

__all__ = [
    "GlobalSubscriberManager",
    "StatisticsSubscriber",
    "SubscriberBase",
    "SubscriberManager",
    "_InspectActivation",
    "inspect_activation",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    found = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
