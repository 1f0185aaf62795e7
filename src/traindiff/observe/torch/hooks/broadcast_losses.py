"""Losses that compare each output of a model with the numbers of all samples, since shapes were broadcast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from traindiff.core.torch_compat.execution import result_shape

MOST_NODES = 32
"""So many nodes of a loss are looked at."""

# fmt: off
_OF_LOSSES = frozenset({
    "Abs", "Add", "Clamp", "ClampMax", "ClampMin", "Div", "Exp", "Expand", "Expm1", "HuberLoss", "Log", "Log1P",
    "LogSigmoid", "Maximum", "Mean", "Minimum", "MseLoss", "Mul", "Neg", "Pow", "Relu", "Rsub", "Sigmoid",
    "SmoothL1Loss", "SoftMarginLoss", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "ToCopy", "Where",
})
# fmt: on
"""Operators of losses that change no shape but by broadcasting or by reducing all of it."""


def broadcast_outputs(loss: Tensor) -> tuple[int, ...]:
    """The shape of N outputs that a loss compares with N numbers each; empty if there is no such place in it.

    That is an operator whose result has the shape (N, N), where one operand with the shape (N, 1) or (N,) has a
    gradient and the other has none. Looks from the loss through operators of losses, so not into the model.

    Args:
        loss: The tensor on which `backward` is called. Nothing is computed, and nothing is read from a device.
    """
    waiting, looked_at = [loss.grad_fn], 0
    while waiting and looked_at < MOST_NODES:
        node = waiting.pop()
        if node is None or _kind(node) not in _OF_LOSSES:
            continue
        looked_at += 1
        following = [one for one in node.next_functions if one[0] is not None]
        made = result_shape(node, 0)
        samples = made[0] if len(made) == 2 and len(set(made)) == 1 else 0
        if samples > 1 and len(following) == 1:
            given = result_shape(*following[0])
            if given in ((samples, 1), (samples,)):
                return given
        waiting += [one for one, _ in following]
    return ()


def _kind(node: Any) -> str:
    """The operator of a node: `Mean` for MeanBackward0."""
    return type(node).__name__.partition("Backward")[0]
