"""Copies of what a step of an optimizer starts from, for a range of a parameter's elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.kernels.torch_arrays import is_abstract
from traindiff.core.shards import Piece, Shard
from traindiff.core.torch_compat.training import sparse_terms_of
from traindiff.observe.torch.replay.formulas import Formula, as_numbers
from traindiff.observe.torch.replay.rounded import Rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where copied elements belong.

    Attributes:
        path: The path of the model's parameter.
        part: The elements among the copied ones.
        shard: Their place in the model's parameter.
    """

    path: str
    part: slice
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A replayed update.

    Attributes:
        value: New parameter minus old one, float64, flat.
        rounding: The largest difference of a correct optimizer's update from that, element by element; infinite where
            the dtype may have overflowed.
    """

    value: Tensor
    rounding: Tensor

    def residual(self, taken: Tensor) -> Tensor:
        """The update that was made minus this one, in units of its rounding."""
        return in_roundings(taken - self.value, self.rounding)

    def stages(self, taken: Tensor) -> dict[str, Tensor]:
        """What is recorded of it and of the update that was made, by stage."""
        return {
            "replayed": self.value, "taken": taken, "rounding": self.rounding, "residual": self.residual(taken)
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The arguments of a formula."""

    parameter: Any
    gradient: Any
    state: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTerms:
    """The terms of a sparse gradient. It may hold a row several times, and an optimizer adds these one after the other.

    Attributes:
        number: How many each element has.
        size: Sum of their magnitudes.
    """

    number: Tensor
    size: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRange:
    """Copies of a range of a parameter's elements and of their gradient and state, in their own dtypes.

    Attributes:
        placed: Where the elements belong; several for a tensor that holds several parameters.
        parameter: The optimizer's tensor.
        part: The range, in row-major order of this rank's part of `parameter`.
        shape: The shape in which the formula gets the elements.
        formula: How the optimizer should update them.
        divided: Whether they are rows or columns of a matrix whose formula needs all of it.
        settings: The settings of the parameter's group.
        others: By where they come from, the settings that a mistaken optimizer may use instead.
        elements: The elements.
        gradient: Their gradient; None if a closure has yet to compute it.
        state: What the optimizer keeps of these elements.
        numbers: What it keeps beside that: numbers, and tensors with one element.
        terms: What a sparse gradient adds up for each element; None for a dense one.
        scale: The loss scale, if the optimizer divides the gradient by it itself (fused, under a loss scaler).
        overflowed: A flag by which the optimizer was told that the gradients overflowed, so that it skips the step.
        short: True if the optimizer computes with its count of steps in float32.
    """

    placed: tuple[Placed, ...]
    parameter: Tensor
    part: slice
    shape: tuple[int, ...]
    formula: Formula
    divided: bool
    settings: dict[str, Any]
    others: Mapping[str, Mapping[str, Any]]
    elements: Tensor
    gradient: Tensor | None
    state: dict[str, Tensor]
    numbers: dict[str, Any]
    terms: SparseTerms | None
    scale: Tensor | None
    overflowed: Tensor | None
    short: bool

    def scalars(self) -> Iterable[Tensor]:
        """The tensors with one element whose values are needed to replay."""
        values = [*self.settings.values(), *self.numbers.values(), self.scale, self.overflowed]
        for value in values:
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Tensor):
                    yield one

    def latest_gradient(self) -> Tensor | None:
        """The gradient: the copy, or if a closure was to compute it, the one that is there now; None without one."""
        if self.gradient is not None:
            return self.gradient
        now = self.parameter.grad
        return None if now is None or now.layout != torch.strided else local_part(now, self.part)

    @property
    def unit(self) -> float:
        """The largest unit roundoff of its numbers."""
        return max(torch.finfo(one.dtype).eps for one in (self.elements, *self.state.values())) / 2.0

    def start(self, gradient: Tensor, read: Callable[[Tensor], float], *, rounded: bool) -> Start:
        """The arguments of the formula: `Rounded`, or plain tensors in float64.

        Args:
            gradient: The gradient in its own dtype.
            read: The number in a tensor of `scalars`.
            rounded: Whether rounding is followed.
        """
        infos = [torch.finfo(one.dtype) for one in (self.elements, gradient, *self.state.values())]
        # The replay itself rounds to float64, so numbers of float64 have twice its rounding.
        units = [info.eps / (1.0 if info.bits == 64 else 2.0) for info in infos]
        tiny = max(info.tiny for info in infos)

        def argument(tensor: Tensor, unit: float, shape: tuple[int, ...] | None = self.shape, **about: Any) -> Any:
            value = tensor.to(torch.float64)
            value = value if shape is None else value.reshape(shape)
            return Rounded(value, unit=unit, tiny=tiny, **about) if rounded else value

        unit = max(units)
        found = argument(gradient, unit)
        if self.terms is not None and rounded:
            found.error = found.error + self._sums() * unit * self.terms.size.to(torch.float64).reshape(self.shape)
        if self.scale is not None:
            found = found / read(self.scale)
        state = {
            name: argument(one, unit, self.shape if one.numel() == self.elements.numel() else None)
            for name, one in self.state.items()
        }
        if self.terms is not None:
            state["touched"] = (self.terms.number > 0).to(torch.float64).reshape(self.shape)
        counted = {"step": 0.0, **self.numbers} if self.short else self.numbers
        numbers = as_numbers(counted, read, short=self.short)
        settings = as_numbers(self.settings, read, short=self.short)
        return Start(
            parameter=argument(self.elements, units[0], is_stored=True),
            gradient=found,
            state={**state, **(numbers if rounded else plain(numbers))},
            settings=settings if rounded else plain(settings),
        )

    def replay(self, gradient: Tensor, read: Callable[[Tensor], float]) -> Update:
        """The update by the formula, with the bound of its rounding."""
        start = self.start(gradient, read, rounded=True)
        new = self.formula.call(start.parameter, start.gradient, start.state, start.settings)
        if not isinstance(new, Rounded) or new.shape != start.parameter.shape:
            raise TypeError(f"it returned {_kind(new)} instead of the parameter after the step")
        tiny, value = start.parameter.tiny, torch.as_tensor(new.value)
        rounding = torch.as_tensor(new.error) + tiny
        if not start.parameter.is_stored or not new.is_stored:
            rounding = rounding + start.parameter.unit * value.abs()
        if self.terms is not None:  # each further term is added to the parameter by itself, and rounded
            rounding = rounding + self._sums() * start.parameter.unit * (start.parameter.value.abs() + value.abs())
        rounding = torch.where(self.may_overflow(start) | rounding.isnan(), torch.inf, rounding)
        update = value - start.parameter.value
        return Update(value=self._unless_skipped(update, read).reshape(-1), rounding=rounding.reshape(-1))

    def _sums(self) -> Tensor:
        """Number of additions among the terms of each element."""
        assert self.terms is not None
        return (self.terms.number - 1.0).clamp(min=0.0).to(torch.float64).reshape(self.shape)

    def varied(self, start: Start, after: Callable[[Start], Any], read: Callable[[Tensor], float]) -> Tensor:
        """The update by another function of plain tensors."""
        new = torch.as_tensor(after(start))
        return self._unless_skipped(new - start.parameter, read).reshape(-1)

    def taken(self) -> Tensor:
        """The elements as they are now minus what they were, float64, flat."""
        return local_part(self.parameter, self.part).to(torch.float64) - self.elements.to(torch.float64)

    def _unless_skipped(self, update: Tensor, read: Callable[[Tensor], float]) -> Tensor:
        return torch.zeros_like(update) if self.overflowed is not None and read(self.overflowed) else update

    def may_overflow(self, start: Start) -> Tensor:
        """True where squares or states may exceed the largest number of the shortest dtype."""
        largest = min(torch.finfo(one.dtype).max for one in (self.elements, *self.state.values()))
        found: Tensor = start.gradient.value.abs() > 0.5 * math.sqrt(largest)
        for one in start.state.values():
            if isinstance(one, Rounded) and one.shape == found.shape:
                found = found | (torch.as_tensor(one.value).abs() > 0.25 * largest)
        return found


def in_roundings(residual: Tensor, rounding: Tensor) -> Tensor:
    """A residual in units of the rounding bound; NaN where it is not finite, which other rules judge."""
    return torch.where(residual.isfinite(), residual / rounding, torch.nan)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values as numbers of Python, without bounds."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return float(value) if isinstance(value, Rounded) else value


def _kind(value: Any) -> str:
    if isinstance(value, (Tensor, Rounded)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def obstacle(parameter: Tensor, piece: Piece) -> str:
    """The reason why the update of a parameter cannot be replayed; empty if it can."""
    gradient = parameter.grad
    known = type(parameter.data) is Tensor or (piece.shard is not None and hasattr(parameter, "placements"))
    if not known:
        return f"the parameter is a {type(parameter.data).__name__}"
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return f"the parameter is {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.device.type in ("mps", "meta"):
        return f"there is no float64 on {parameter.device.type}"
    if gradient is not None and is_abstract(gradient):
        return f"the gradient is a {type(gradient).__name__}"
    if gradient is not None and not (gradient.layout == torch.strided or _has_sparse_rows(gradient)):
        return f"the gradient is {str(gradient.layout).removeprefix('torch.')}"
    placements = [getattr(one, "placements", None) for one in (parameter, gradient) if one is not None]
    if placements[0] != placements[-1]:
        return "the gradient is divided otherwise over ranks"
    return ""


def is_divided(parameter: Tensor, piece: Piece) -> bool:
    """True if this rank holds a part of a parameter that is a DTensor."""
    is_part = piece.shard is not None and piece.shard.size < math.prod(piece.shard.global_shape)
    return hasattr(parameter, "placements") and is_part


def next_part(whole: Shard, start: int, most: int) -> tuple[slice, Shard]:
    """The next elements to copy: a flat range, or rows if the rank holds no range of the parameter.

    Args:
        whole: The place in the parameter of all elements that may be copied.
        start: The element to begin with, in row-major order.
        most: The most elements to copy; a row may have more.

    Returns:
        The elements, in row-major order, and their place in the parameter.
    """
    if not whole.contiguous:
        row = whole.size // whole.shape[0]
        first = start // row
        rows = min(max(1, most // row), whole.shape[0] - first)
        offset = (whole.offset[0] + first, *whole.offset[1:])
        shard = Shard(shape=(rows, *whole.shape[1:]), global_shape=whole.global_shape, offset=offset)
        return slice(first * row, (first + rows) * row), shard
    count = min(most, whole.size - start)
    if count == whole.size:
        return slice(0, count), whole
    flat = Shard(shape=(count,), global_shape=whole.global_shape, offset=(whole.start + start,))
    return slice(start, start + count), flat


def of_real_numbers(shard: Shard) -> Shard:
    """The place of the real and imaginary parts of complex elements: a last axis of length 2."""
    if len(shard.shape) != len(shard.global_shape):
        flat = shard.shape[0] * 2, shard.offset[0] * 2
        return Shard(shape=flat[:1], global_shape=(*shard.global_shape, 2), offset=flat[1:])
    return Shard(shape=(*shard.shape, 2), global_shape=(*shard.global_shape, 2), offset=(*shard.offset, 0))


def local_part(tensor: Tensor, part: slice) -> Tensor:
    """Elements as they are now, flat; this rank's elements of a DTensor; real and imaginary parts of complex ones."""
    held: Any = tensor.detach()
    local: Tensor = held.to_local() if hasattr(held, "to_local") else held
    if local.layout != torch.strided:
        return _dense_part(local, part)
    found = local.reshape(-1)[part]
    return torch.view_as_real(found.resolve_conj()).reshape(-1) if found.is_complex() else found


def sparse_terms(gradient: Tensor | None, part: slice) -> SparseTerms | None:
    """What a sparse gradient adds up for each element of a range; None for a dense gradient."""
    if gradient is None or gradient.layout == torch.strided:
        return None
    rows, values = sparse_terms_of(gradient.detach())
    sizes = values.abs().to(torch.float64)
    number, size = (
        _dense_part(torch.sparse_coo_tensor(rows, values, gradient.shape, check_invariants=False), part)
        for values in (torch.ones_like(sizes), sizes)
    )
    return SparseTerms(number=number, size=size)


def _has_sparse_rows(gradient: Tensor) -> bool:
    return gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1 and not gradient.is_complex()


def _dense_part(gradient: Tensor, part: slice) -> Tensor:
    """A range of the elements of a tensor with sparse rows."""
    whole = gradient.coalesce()
    row = math.prod(gradient.shape[1:])
    first, last = part.start // row, -(-part.stop // row)
    numbers = whole.indices()[0]
    chosen = (numbers >= first) & (numbers < last)
    places = numbers[chosen] - first
    values = whole.values().new_zeros(last - first, row)
    values[places] = whole.values()[chosen].reshape(-1, row)
    return values.reshape(-1)[part.start - first * row : part.stop - first * row]


def left_with(optimizer: Optimizer, name: str) -> Tensor | None:
    """A copy of a tensor that a loss scaler leaves with an optimizer for the length of a step."""
    value = getattr(optimizer, name, None)
    return value.detach().clone() if isinstance(value, Tensor) else None


def read_together(tensors: Sequence[Tensor]) -> Callable[[Tensor], float]:
    """A function that gives the number in each of these tensors; waits once for each device."""
    numbers: dict[int, float] = {}
    for device in dict.fromkeys(one.device for one in tensors):
        here = {id(one): one for one in tensors if one.device == device}
        values = torch.stack([one.detach().reshape(()).to(torch.float64) for one in here.values()]).tolist()
        numbers.update(zip(here, values, strict=True))
    return lambda tensor: numbers[id(tensor)]
