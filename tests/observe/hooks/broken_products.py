"""A kernel that computes something else, as a mode that a training is inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Breaks(TorchDispatchMode):
    """Changes what some calls of an operator return.

    Args:
        operator: Its name, e.g. `aten.mm`.
        change: Makes what is returned of the arguments and of what was computed.
        calls: The calls that are changed, counted from 0 in the order in which they run.
    """

    def __init__(self, operator: str, change: Callable[[tuple[Any, ...], Any], Any], calls: set[int]) -> None:
        super().__init__()
        self._operator = operator
        self._change = change
        self._calls = calls
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if str(func).startswith(f"{self._operator}."):
            self.seen += 1
            if self.seen - 1 in self._calls:
                return self._change(args, output)
        return output


def one_element(row: int, column: int = 0, *, by: float = 100.0) -> Callable[[tuple[Any, ...], Any], Any]:
    """One element of the output is wrong."""

    def change(_: tuple[Any, ...], output: Tensor) -> Tensor:
        output = output.clone()
        output[row, column] += by
        return output

    return change
