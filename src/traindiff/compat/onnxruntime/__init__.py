"""The convergence tools of `onnxruntime.training.utils.hooks`, under their names, with their arguments and files.

```python
from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber

GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir="pt_out", override_output_dir=True)])
```

The model is one of PyTorch's, or the one in an ORTModule; see docs/activations.md. Needs torch 1.13 or later, and
nothing of ONNX Runtime unless there is an ORTModule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traindiff.compat.onnxruntime.inspecting import _InspectActivation
from traindiff.compat.onnxruntime.manager import SubscriberManager
from traindiff.compat.onnxruntime.run_context import SubscriberBase
from traindiff.compat.onnxruntime.subscriber import StatisticsSubscriber

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "GlobalSubscriberManager",
    "StatisticsSubscriber",
    "SubscriberBase",
    "SubscriberManager",
    "_InspectActivation",
    "inspect_activation",
]

GlobalSubscriberManager = SubscriberManager()
"""The manager of this process, as in the original."""


def inspect_activation(activation_name: str, tensor: Tensor) -> Tensor:
    """Have an intermediate tensor, and its gradient, observed by the subscribers; nothing where there are none.

    Args:
        activation_name: What it is called. A name that is used several times in a step is numbered.
        tensor: The tensor.

    Returns:
        The tensor.
    """
    inspected: Tensor = _InspectActivation.apply(
        activation_name, None, GlobalSubscriberManager.get_run_context(), tensor
    )
    return inspected
