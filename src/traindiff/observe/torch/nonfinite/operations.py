"""The operators of one module's call, written down so that they can be run again without the module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from traindiff.observe.torch.nonfinite.argument_checks import FLOATS, NAMED

Json = Any
"""What JSON can hold."""


class NotWritableError(Exception):
    """An argument of an operator cannot be written down; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: Its full name, e.g. `aten.addmm.default`.
        args: Positional arguments, written by `to_json`.
        kwargs: The others, by name.
        output: What it returned: numbers of tensors where tensors were.
        drawn: Of one that draws random numbers: numbers of the tensors that have them, one for each in `output`.
    """

    name: str
    args: Sequence[Json]
    kwargs: Mapping[str, Json] = field(default_factory=dict)
    output: Json = None
    drawn: tuple[int, ...] = ()

    @property
    def arguments(self) -> list[Json]:
        """All arguments, without their names."""
        return [*self.args, *self.kwargs.values()]

    def to_json(self) -> dict[str, Json]:
        """As JSON values, without what is as by default."""
        found: dict[str, Json] = {"name": self.name, "args": list(self.args), "output": self.output}
        if self.kwargs:
            found["kwargs"] = dict(self.kwargs)
        if self.drawn:
            found["drawn"] = list(self.drawn)
        return found

    @classmethod
    def from_json(cls, content: Mapping[str, Json]) -> Self:
        """What `to_json` made."""
        return cls(
            name=content["name"],
            args=content["args"],
            kwargs=content.get("kwargs", {}),
            output=content["output"],
            drawn=tuple(content.get("drawn", ())),
        )


def to_json(value: Any, number: Callable[[Tensor], int]) -> Json:
    """An argument as JSON values; `number` gives the numbers that stand for tensors.

    Raises:
        NotWritableError: It is, or holds, something that has no such form.
    """
    if isinstance(value, Tensor):
        return {"tensor": number(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [to_json(value.real, number), to_json(value.imag, number)]}
    if isinstance(value, (list, tuple)):
        return [to_json(one, number) for one in value]
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    raise NotWritableError(f"an argument is a {type(value).__name__}")


def from_json(
    value: Json,
    tensor: Callable[[int], Tensor],
    *,
    dtype: Callable[[torch.dtype], torch.dtype] = lambda one: one,
    device: torch.device | None = None,
) -> Any:
    """The argument that `to_json` wrote; `allowed_operators.check` has found it to be one.

    Args:
        value: What it wrote.
        tensor: Gives the tensors that numbers stand for.
        dtype: Gives the dtype that is to be used in place of one.
        device: Where new tensors are made; the CPU where left out.
    """
    if isinstance(value, list):
        return [from_json(one, tensor, dtype=dtype, device=device) for one in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "tensor":
        return tensor(content)
    if kind == "torch":
        named = NAMED[content]
        return dtype(named) if isinstance(named, torch.dtype) else named
    if kind == "device":
        return device or torch.device("cpu")
    if kind == "float":
        return FLOATS[content]
    return complex(*(from_json(one, tensor) for one in content))


def numbers_of(value: Json) -> Iterator[int]:
    """The numbers of tensors in what was written down, in order; its depth is bounded."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from numbers_of(one)
    elif isinstance(value, dict) and type(number := value.get("tensor")) is int:
        yield number
