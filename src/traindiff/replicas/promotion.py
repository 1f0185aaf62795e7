"""Compute an operator with its floating-point arguments in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_BITS = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}


def is_shorter(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether `dtype` is a floating-point dtype that is to be computed in the longer one; float8 never is."""
    return _BITS.get(dtype, 64) < _BITS[than]


@dataclass(slots=True)
class Cast:
    """A call of an operator, with tensors cast, that writes back to the tensors that were given.

    Attributes:
        operator: The operator.
        dtype_of: The dtype in which it is to see a tensor; is asked for floating-point tensors only.
        written: Copies of arguments that the operator writes to, with the arguments.
    """

    operator: Any
    dtype_of: Callable[[Tensor, bool], torch.dtype]
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Its result; where that is an argument, the argument that was given."""
        schema = self.operator._schema.arguments
        positional = [self._cast(arg, writes_to(one)) for arg, one in zip(args, schema, strict=False)]
        writes = {one.name: writes_to(one) for one in schema}
        named = {name: self._cast(arg, writes.get(name, False)) for name, arg in kwargs.items()}
        result = self.operator(*positional, **named)
        for copy, given in self.written:
            given.copy_(copy)
        return tree_map(self._given, result)

    def _cast(self, argument: Any, written: bool) -> Any:  # noqa: FBT001
        return tree_map(lambda one: self._cast_one(one, written), argument)

    def _cast_one(self, argument: Any, written: bool) -> Any:  # noqa: FBT001
        if not isinstance(argument, Tensor) or not argument.is_floating_point():
            return argument
        dtype = self.dtype_of(argument, written)
        if dtype == argument.dtype:
            return argument
        copy = argument.to(dtype)
        if written:
            self.written.append((copy, argument))
        return copy

    def _given(self, result: Any) -> Any:
        return next((given for copy, given in self.written if copy is result), result)


def writes_to(argument: Any) -> bool:
    """Whether an operator writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def is_view(operator: Any) -> bool:
    """Whether what the operator returns shares memory with an argument that it does not write to."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in operator._schema.arguments)


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator."""
    return [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
