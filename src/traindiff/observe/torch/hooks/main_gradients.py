"""Gradients that a training keeps beside `.grad`: in `main_grad` of the parameters, as Megatron does.

Megatron adds each contribution to `parameter.main_grad`, in float32, and leaves `.grad` None. Its optimizer of short
dtypes holds copies of the parameters in float32, so it holds none of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from traindiff.core.shards import Piece
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.hooks.step_tensors import main_gradient


class CopiesTap(OptimizerTap):
    """Follows an optimizer of copies: the gradients are in `main_grad` of the model's own parameters.

    Which copy is of which parameter is not known, so state and updates are not observed.
    """

    HOLDS_GROUPS = False

    def __init__(self, *args: Any, **about: Any) -> None:
        super().__init__(*args, **about)
        self._parameters = about["context"].targets.parameters

    def held(self) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        """Yield the model's parameters that have a gradient in `main_grad`; see `OptimizerTap.held`."""
        for path, parameter in self._parameters.items():
            if main_gradient(parameter) is not None:
                yield 0, parameter, (Piece(path=path),)
