"""The checks of a layer's products where its calls look alike: all but the numbers is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from traindiff.core.kernels.registry import LINEAR_CHECKS, installed
from traindiff.core.kernels.torch_arrays import dtype_name
from traindiff.core.torch_compat.alike import looks_like
from traindiff.observe.torch.products.rounding import Format, weights
from traindiff.observe.torch.witness.layer_products import Factor, format_of, signs


class Prepared:
    """Checks the calls of a linear layer that look like one which was checked.

    The user's settings of precision are those of the time when it is made.

    Args:
        kernel: The kernel that checks.
        given: The input of that call.
        weight: Its weight.
        bias: Its bias, if it has one.
        output: Its output.
    """

    def __init__(self, kernel: Any, given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
        self._outputs, self._inputs = outputs, inputs = weight.shape
        self._rows = prod(output.shape[:-1])
        self._positions = prod(output.shape[1:-1])
        self._kernel = kernel
        self._dtype = weight.dtype
        self._format: Format = format_of(weight.dtype, weight.dtype, weight.dtype, "cpu")
        self._signs = signs(outputs, weight.device), signs(inputs, weight.device)
        self._looks = looks_like((given, weight, output) if bias is None else (given, weight, output, bias))
        self._looks_back: Callable[[Sequence[Any]], bool] | None = None
        by = weights(self._format, outputs, inputs)
        self._output = kernel.Output(self._shape(inputs, weight), by, *self._signs)
        self._of_input: Any = None

    def output(self, given: Any, weight: Any, bias: Any, output: Any) -> tuple[Tensor, Tensor] | None:
        """The check of an output, and what `of_input` needs; None if the call looks otherwise."""
        tensors = (given, weight, output) if bias is None else (given, weight, output, bias)
        if self._looks is None or not self._looks(tensors):
            return None
        addresses = [one.data_ptr() for one in tensors]
        if not all(addresses):
            return None  # an engine has freed its memory
        found: tuple[Tensor, Tensor] = self._output(*addresses)
        return found

    def of_input(self, by_output: Tensor, gradient: Any, found: Any) -> Tensor | None:
        """The check of a gradient of the input; None if it looks otherwise than the first one."""
        tensors = gradient, found
        if self._looks_back is None:
            if not _is_like(gradient, found, self._dtype) or gradient.shape != (self._rows, self._outputs):
                return None
            self._looks_back = looks_like(tensors)
            by = weights(self._format, self._inputs, self._outputs)
            self._of_input = self._kernel.OfInput(self._shape(self._outputs, gradient), by, self._signs[1])
        if self._looks_back is None or not self._looks_back(tensors):
            return None
        addresses = gradient.data_ptr(), found.data_ptr()
        checked: Tensor | None = self._of_input(addresses[0], by_output, addresses[1]) if all(addresses) else None
        return checked

    def factor(self, by_output: Tensor) -> Factor:
        """The weight of a call, as the gradient of its input needs it."""
        return Factor(
            shape=(self._outputs, self._inputs), dtype=self._dtype, by_input=None,
            by_output=by_output[:-1].view(2, self._outputs), largest=float(by_output[-1]),
        )  # fmt: skip

    def _shape(self, terms: int, like: Tensor) -> Any:
        counts = terms, self._rows, self._positions
        return self._kernel.Shape(dtype_name(like), self._rows, self._outputs, self._inputs, counts)


def prepared(given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Prepared | None:
    """What is known beforehand of calls that look like one; None if nothing is.

    Args:
        given: The input of the call: an ordinary tensor, as all others.
        weight: Its weight.
        bias: Its bias, if it has one.
        output: Its output.
    """
    kernel = next((module for _, module in installed(LINEAR_CHECKS)), None)
    others = (weight, output) if bias is None else (weight, output, bias)
    if kernel is None or not kernel.reads(weight) or not all(_is_like(given, one, given.dtype) for one in others):
        return None
    return Prepared(kernel, given, weight, bias, output)


def _is_like(one: Any, other: Any, dtype: Any) -> bool:
    """True for contiguous tensors of one dtype in memory."""
    return all(
        isinstance(part, Tensor) and part.dtype == dtype and part.is_cpu and part.is_contiguous()
        for part in (one, other)
    )  # fmt: skip
