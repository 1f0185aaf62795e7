"""Running error analysis: numbers in float64 with a bound of what rounding may have done to the training's own.

The formula of an optimizer is written once, with operators and a few functions. Computed with `Rounded` numbers it
gives the update and the largest difference that a correct optimizer may have from it; computed with plain tensors, or
with numbers of Python, it gives the update alone.

The bounds are those of Wilkinson's running error analysis (Higham, Accuracy and Stability of Numerical Algorithms,
2002, section 3.3): each operation passes on the errors of its operands, and adds one unit roundoff of its result, or
of the terms that may cancel in it. A constant is rounded to the dtype in which it is used. They hold for every order
in which the elementwise kernels of torch (for-loop, foreach, fused, capturable, compiled) do the operations, in the
dtype of the numbers or in a longer one. NaN and infinities go through as arithmetic takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHORT = 2.0**-24
"""Unit roundoff of float32: kernels convert constants to it, if their numbers are not of float64."""

Value = float | Tensor
"""A number in Python, or a tensor in float64."""


class Rounded:
    """A number, or a tensor of numbers, with a bound of its rounding error.

    Supports `+ - * / **`, negation, comparisons (of the values), and these functions, as methods or as functions of
    torch: `abs`, `sqrt`, `rsqrt`, `square`, `sign`, `maximum`, `minimum`, `clamp(min, max)`, `mean(dim, keepdim)`,
    `norm(dim, keepdim)`, `mT`. An expression that begins with the parameter is stored in the parameter's dtype:
    `parameter * (1 - lr * decay) - lr * direction` means `parameter.mul_(...).sub_(...)`.

    Attributes:
        value: A float, or a tensor in float64.
        error: The largest absolute difference of the training's own value; of the same kind, or 0.
        unit: Unit roundoff of the results of operations with it. 0 for numbers of Python.
        tiny: The most that underflow may lose: the smallest normal number.
        is_stored: True if results of operations that begin with it are stored in its own dtype.
    """

    __slots__ = ("error", "is_stored", "tiny", "unit", "value")

    def __init__(
        self, value: Value, error: Value = 0.0, *, unit: float = 0.0, tiny: float = 0.0, is_stored: bool = False
    ) -> None:
        self.value = value
        self.error = error
        self.unit = unit
        self.tiny = tiny
        self.is_stored = is_stored

    @property
    def shape(self) -> torch.Size:
        """The shape of the value; `()` for a number."""
        return self.value.shape if isinstance(self.value, Tensor) else torch.Size()

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def __add__(self, other: Any) -> Rounded:
        other = self.operand(other)
        value = self.value + other.value
        unit = self.unit_with(other)
        # The terms may cancel, and `lerp` rounds their difference.
        return self.result(
            other, value, self.error + other.error + unit * (_magnitude(self.value) + _magnitude(other.value))
        )

    def __radd__(self, other: Any) -> Rounded:
        return self.operand(other) + self

    def __sub__(self, other: Any) -> Rounded:
        return self + -self.operand(other)

    def __rsub__(self, other: Any) -> Rounded:
        return self.operand(other) + -self

    def __neg__(self) -> Rounded:
        return self._like(-self.value, self.error)

    def __mul__(self, other: Any) -> Rounded:
        other = self.operand(other)
        value = self.value * other.value
        error = _times(_magnitude(self.value), other.error) + _times(self.error, _magnitude(other.value) + other.error)
        return self.result(other, value, error + self.unit_with(other) * _magnitude(value) + self._lost(other, value))

    def __rmul__(self, other: Any) -> Rounded:
        return self.operand(other) * self

    def __truediv__(self, other: Any) -> Rounded:
        other = self.operand(other)
        value = _quotient(self.value, other.value)
        divisor = _magnitude(other.value)
        # A divisor that is all error bounds nothing: the quotient may then be anything.
        least = divisor - other.error
        least = maximum(least, 1e-3 * divisor) if isinstance(least, Tensor) else max(least, 1e-3 * divisor)
        error = _quotient(_magnitude(self.value) + self.error, least) - _magnitude(value)
        return self.result(other, value, error + self.unit_with(other) * _magnitude(value) + self._lost(other, value))

    def __rtruediv__(self, other: Any) -> Rounded:
        return self.operand(other) / self

    def __pow__(self, exponent: Any) -> Rounded:
        if isinstance(exponent, (int, float)):
            if exponent == 2:
                return self.square()
            if exponent == 0.5:
                return self.sqrt()
            if exponent == -0.5:
                return self.rsqrt()
        return self.operand(exponent).as_exponent_of(self)

    def __rpow__(self, base: Any) -> Rounded:
        return self.as_exponent_of(self.operand(base))

    def as_exponent_of(self, base: Rounded) -> Rounded:
        """A power of `base`."""
        value = base.value**self.value
        relative = _quotient(base.error, _magnitude(base.value)) * _magnitude(self.value) + self.error * _magnitude(
            _log(base.value)
        )
        return base.result(self, value, _magnitude(value) * (relative + 2.0 * base.unit_with(self)))

    def __abs__(self) -> Rounded:
        return self._like(_magnitude(self.value), self.error)

    def abs(self) -> Rounded:
        """The absolute value."""
        return abs(self)

    def square(self) -> Rounded:
        """The square."""
        return self * self

    def sqrt(self) -> Rounded:
        """The square root; of 0 for negative numbers, which rounding alone makes."""
        low, high = _at_least_0(self.value - self.error), _at_least_0(self.value + self.error)
        value = _root(_at_least_0(self.value))
        error = value - _root(low)
        up = _root(high) - value
        error = maximum(error, up) if isinstance(error, Tensor) or isinstance(up, Tensor) else max(error, up)
        return self._like(value, error + self.unit * value)

    def rsqrt(self) -> Rounded:
        """One divided by the square root."""
        return 1.0 / self.sqrt()

    def sign(self) -> Rounded:
        """-1, 0 or 1; where the sign is uncertain, the error says so."""
        found: Rounded = by_sign(self, positive=1.0, zero=0.0, negative=-1.0)
        return found

    def clamp(self, min: Any = None, max: Any = None) -> Rounded:  # noqa: A002 - the names that torch has
        """The nearest number between `min` and `max`."""
        found: Rounded = self if min is None else maximum(self, min)
        if max is None:
            return found
        bounded: Rounded = minimum(found, max)
        return bounded

    def mean(self, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False) -> Rounded:
        """The mean over some dims, or all."""
        terms = self._tensor.abs().mean(dim, keepdim=keepdim)
        value = self._tensor.mean(dim, keepdim=keepdim)
        error = self._errors.mean(dim, keepdim=keepdim)
        return self._like(value, error + _of_a_sum(self.numel() // max(1, value.numel()), self.unit) * terms)

    def norm(self, p: int = 2, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False) -> Rounded:
        """The Euclidean norm over some dims, or all."""
        if p != 2:
            raise TypeError(f"a formula can use the norm with p=2 only, not p={p}")
        value = torch.linalg.vector_norm(self._tensor, dim=dim, keepdim=keepdim)
        error = torch.linalg.vector_norm(self._errors, dim=dim, keepdim=keepdim)
        return self._like(value, error + _of_a_sum(self.numel() // max(1, value.numel()), self.unit) * value)

    @property
    def mT(self) -> Rounded:  # noqa: N802 - the name that torch has
        """The transpose of a matrix."""
        error = self.error.mT if isinstance(self.error, Tensor) and self.error.dim() else self.error
        return self._like(self._tensor.mT, error)

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < self.operand(other).value)

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > self.operand(other).value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let `torch.sqrt(x)` mean `x.sqrt()`, and `tensor * x` work."""
        name = getattr(function, "__name__", "")
        method = _OPERATORS.get(name) or getattr(cls, name if name in _METHODS else "", None)
        if method is None:
            raise TypeError(
                f"a formula cannot use torch.{name}, because its rounding is unknown; it can use + - * / ** and "
                f"{', '.join(sorted(_METHODS))}"
            )
        first, *rest = args
        if not isinstance(first, Rounded):
            first = rest[0].operand(first)
        return method(first, *rest, **(kwargs or {}))

    @property
    def _tensor(self) -> Tensor:
        return self.value if isinstance(self.value, Tensor) else torch.tensor(self.value, dtype=torch.float64)

    @property
    def _errors(self) -> Tensor:
        """The error bounds, one for each element."""
        if isinstance(self.error, Tensor):
            return self.error.expand(self.shape)
        return torch.full_like(self._tensor, self.error)

    def operand(self, other: Any) -> Rounded:
        """The other operand; a constant is rounded to the dtype of this one, at most to float32."""
        if isinstance(other, Rounded):
            if other.unit or not self.unit:
                return other
            return Rounded(other.value, other.error + _cast(other.value, self.unit), tiny=self.tiny)
        if isinstance(other, Tensor):
            return Rounded(other.to(torch.float64), unit=self.unit, tiny=self.tiny)
        number = float(other)
        return Rounded(number, _cast(number, self.unit), tiny=self.tiny)

    def unit_with(self, other: Rounded) -> float:
        """The unit roundoff of the result of an operation that begins with this operand."""
        return self.unit if self.is_stored else max(self.unit, other.unit)

    def _lost(self, other: Rounded, value: Value) -> Value:
        """What underflow may lose; nothing of a product that is exactly 0."""
        tiny = max(self.tiny, other.tiny)
        if isinstance(value, Tensor):
            return (value != 0).to(value.dtype).mul_(tiny)
        return tiny if value else 0.0

    def result(self, other: Rounded, value: Value, error: Value) -> Rounded:
        """The result of an operation that begins with this operand."""
        return Rounded(
            value, error, unit=self.unit_with(other), tiny=max(self.tiny, other.tiny), is_stored=self.is_stored
        )

    def _like(self, value: Value, error: Value) -> Rounded:
        return Rounded(value, error, unit=self.unit, tiny=self.tiny)


Number = Value | Rounded
"""What formulas compute with."""


def by_sign(selector: Number, *, positive: Any, zero: Any, negative: Any) -> Any:
    """One of three numbers, as the sign of `selector` is; where rounding may change the sign, the error covers all.

    Args:
        selector: A number or a tensor.
        positive: The result where the selector is positive; a number, a tensor of its shape, or `Rounded`.
        zero: Where it is 0.
        negative: Where it is negative.
    """
    if not isinstance(selector, Rounded):
        if not isinstance(selector, Tensor):
            return positive if selector > 0 else negative if selector < 0 else zero
        zeros = torch.zeros_like(selector)
        rest = torch.where(selector < 0, zeros + negative, zeros + zero)
        return torch.where(selector > 0, zeros + positive, torch.where(selector.isnan(), selector, rest))
    choices = [selector.operand(one) for one in (positive, zero, negative)]
    values = [one.value for one in choices]
    # Constants may be stored among the selector's own numbers, so they are rounded like these.
    errors = [
        selector.unit * _magnitude(one.value) if isinstance(one.value, float) and one.error else one.error
        for one in choices
    ]
    value = by_sign(selector.value, positive=values[0], zero=values[1], negative=values[2])
    error = by_sign(selector.value, positive=errors[0], zero=errors[1], negative=errors[2])
    uncertain = (_magnitude(selector.value) <= selector.error) & (selector.error > 0)
    spread: Value = 0.0
    for one in values:
        spread = spread + _magnitude(value - one)
    return Rounded(value, error + uncertain * spread, unit=selector.unit, tiny=selector.tiny)


def maximum(one: Any, other: Any) -> Any:
    """The larger of two numbers, element by element; NaN if one is NaN."""
    return _larger(one, other, torch.maximum, max)


def minimum(one: Any, other: Any) -> Any:
    """The smaller of two numbers, element by element; NaN if one is NaN."""
    return _larger(one, other, torch.minimum, min)


def in_float32(number: float, like: Number) -> Number:
    """A number that the optimizer keeps in float32, but has not made yet; `Rounded` where `like` is."""
    return Rounded(number, _cast(number, SHORT), unit=SHORT) if isinstance(like, Rounded) else number


def sqrt(number: Any) -> Any:
    """The square root of a number of any kind."""
    return number.sqrt() if isinstance(number, (Rounded, Tensor)) else math.sqrt(number)


def _larger(one: Any, other: Any, of_tensors: Callable[..., Tensor], of_numbers: Callable[..., float]) -> Any:
    if isinstance(one, Rounded) or isinstance(other, Rounded):
        first: Rounded = one if isinstance(one, Rounded) else _stored_like(one, other)
        second = other if isinstance(other, Rounded) else _stored_like(other, first)
        value = _larger(first.value, second.value, of_tensors, of_numbers)
        return first.result(second, value, _larger(first.error, second.error, torch.maximum, max))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        like: Tensor = one if isinstance(one, Tensor) else other
        about: Any = {"dtype": like.dtype, "device": like.device}
        return of_tensors(*(x if isinstance(x, Tensor) else torch.tensor(x, **about) for x in (one, other)))
    return of_numbers(one, other)


def _stored_like(constant: Any, like: Rounded) -> Rounded:
    """An operand; a constant that may become an element is rounded to the dtype of the elements."""
    found = like.operand(constant)
    if isinstance(found.value, float) and found.error:
        return Rounded(found.value, like.unit * abs(found.value), tiny=found.tiny)
    return found


def _cast(value: Value, unit: float) -> Value:
    """What rounding a constant to float32 may change, or to float64 beside numbers of float64."""
    if isinstance(value, float) and (not value or math.frexp(value)[0] in (0.5, -0.5)):
        return 0.0  # powers of two are exact
    return min(unit, SHORT) * _magnitude(value)


def _of_a_sum(count: int, unit: float) -> float:
    """Relative rounding error of a sum of terms, accumulated in float32 or longer, as a share of their magnitudes.

    The square root is the probabilistic bound of Higham and Mary, A New Approach to Probabilistic Rounding Error
    Analysis, SIAM J. Sci. Comput. 41 (2019).
    """
    return 2.0 * unit + (8.0 + math.sqrt(count)) * min(unit, SHORT)


def _magnitude(value: Value) -> Value:
    return value.abs() if isinstance(value, Tensor) else abs(value)


def _times(one: Value, other: Value) -> Value:
    """A product of magnitudes; 0 times anything is 0, also times infinity."""
    if any(isinstance(factor, float) and not factor for factor in (one, other)):
        return 0.0
    return one * other


def _quotient(one: Value, other: Value) -> Value:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one / other
    return one / other if other else math.copysign(math.inf, one) if one else math.nan


def _log(value: Value) -> Value:
    if isinstance(value, Tensor):
        return value.log()
    return math.log(value) if value > 0 else 0.0


def _root(value: Value) -> Value:
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def _at_least_0(value: Value) -> Value:
    return value.clamp(min=0.0) if isinstance(value, Tensor) else max(value, 0.0)


_METHODS = frozenset(
    {"abs", "clamp", "maximum", "mean", "minimum", "norm", "rsqrt", "sign", "sqrt", "square"}
)  # fmt: skip
"""Functions of torch that are methods of `Rounded`."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": Rounded.__add__, "sub": Rounded.__sub__, "mul": Rounded.__mul__, "div": Rounded.__truediv__,
    "pow": Rounded.__pow__, "neg": Rounded.__neg__, "maximum": maximum, "minimum": minimum,
    "true_divide": Rounded.__truediv__,
}  # fmt: skip
"""Operators of tensors with a `Rounded` number on the other side."""
