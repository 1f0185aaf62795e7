"""What a subscriber is: told of every output of every module, and of its gradient."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from traindiff.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from traindiff.compat.onnxruntime.manager import Model


class SubscriberBase:
    """Follows the activations of some steps. A subclass does something in `saw`.

    Args:
        start_step: The first step that it follows; None for 0.
        end_step: The step before which it stops; None for none.

    Raises:
        ConfigError: They are no steps, or no step lies between them.
    """

    def __init__(self, start_step: int | None, end_step: int | None) -> None:
        self._start_step = 0 if start_step is None else start_step
        self._end_step = sys.maxsize if end_step is None else end_step
        steps = self._start_step, self._end_step
        if not all(isinstance(step, int) for step in steps) or not 0 <= self._start_step < self._end_step:
            problem = Problem(
                where=f"start_step={start_step!r}, end_step={end_step!r}",
                what="names no step: the first is start_step, the last the one before end_step.",
                fix="Write start_step=10, end_step=20, counted from 0, or leave either out.",
            )
            raise ConfigError(type(self).__name__, [problem])

    def follows(self, step: int) -> bool:
        """Whether it wants to be told of a step."""
        return self._start_step <= step < self._end_step

    def begin(self, model: Model) -> None:
        """A model is subscribed."""

    def saw(self, tensor: Tensor, *, name: str, depth: int, step: int, call: int, forward: bool) -> None:
        """A module returned a tensor, or its gradient came back.

        Args:
            tensor: Either.
            name: `Linear_1_0th_output`, or as the user called it.
            depth: Of the module, 1 for the root; -1 of what no module returned.
            step: Of the forward pass.
            call: How often the name was used before in that forward pass.
            forward: Whether it is the tensor itself, and not its gradient.
        """

    def close(self) -> None:
        """Nothing more will come."""
