"""The operators of a loss, and what they tell: whether shapes are broadcast, and whether it sums over alignments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from traindiff.core.torch_compat.autograd import result_shape

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

_OF_ALIGNMENTS = frozenset({"CtcLoss", "CudnnCtcLoss"})


def operators_of(loss: Tensor) -> list[Any]:
    """The nodes of a loss, from its end through operators of losses to the first one of another kind.

    Args:
        loss: The tensor on which `backward` is called. Nothing is computed, and nothing is read from a device.
    """
    waiting, found, looked_at = [loss.grad_fn], [], 0
    while waiting and looked_at < MOST_NODES:
        node = waiting.pop()
        if node is None:
            continue
        found.append(node)
        if _kind(node) in _OF_LOSSES:
            looked_at += 1
            waiting += [one for one, _ in node.next_functions]
    return found


def broadcast_outputs(operators: Iterable[Any]) -> tuple[int, ...]:
    """The shape of N outputs that a loss compares with N numbers each; empty if there is no such place in it.

    That is an operator whose result has the shape (N, N), where one operand with the shape (N, 1) or (N,) has a
    gradient and the other has none. Looks from the loss through operators of losses, so not into the model.

    Args:
        operators: See `operators_of`.
    """
    for node in operators:
        if _kind(node) not in _OF_LOSSES:
            continue
        following = [one for one in node.next_functions if one[0] is not None]
        made = result_shape(node, 0)
        samples = made[0] if len(made) == 2 and len(set(made)) == 1 else 0
        if samples > 1 and len(following) == 1:
            given = result_shape(*following[0])
            if given in ((samples, 1), (samples,)):
                return given
    return ()


def size_of_alignments(operators: Iterable[Any]) -> float:
    """Positions x ln(classes) of the CTC loss in a loss, of the largest if it has several; 0 without one.

    Args:
        operators: See `operators_of`.
    """
    sizes = [0.0]
    for node in operators:
        if _kind(node) in _OF_ALIGNMENTS:
            positions, *_, classes = result_shape(*node.next_functions[0])
            sizes.append(positions * math.log(max(2, classes)))
    return max(sizes)


def _kind(node: Any) -> str:
    """The operator of a node: `Mean` for MeanBackward0."""
    return type(node).__name__.partition("Backward")[0]
