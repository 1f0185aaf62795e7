"""FSDP1 (FullyShardedDataParallel): parameters flattened into one tensor, of which each rank holds a range."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from traindiff.core.shards import Piece, Shard
from traindiff.core.site import canonical_path
from traindiff.core.torch_compat.training import FLAT_PARAMETER, FlatLayout, flat_layout, modules_by_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter of the model in a flat one.

    Attributes:
        path: Its canonical path.
        others: Canonical paths of its further names, if it is tied.
        shape: Its shape.
        first: Index of its first element in the gathered flat tensor.
        local_first: Index of the first element that this rank holds in the local part of the flat tensor.
        held_first: Number of the first element that this rank holds, in row-major order.
        held: Number of consecutive elements that this rank holds.
        parameter: The module's own parameter, a view of the local part; None if the flat one has replaced it.
    """

    path: str
    others: tuple[str, ...]
    shape: tuple[int, ...]
    first: int
    local_first: int
    held_first: int
    held: int
    parameter: nn.Parameter | None

    @property
    def size(self) -> int:
        """Number of its elements, on all ranks."""
        return prod(self.shape)

    def range(self, offset: int, size: int) -> Shard:
        """A range of `size` elements, in row-major order."""
        return Shard(shape=(size,), global_shape=self.shape, offset=(offset,))

    def pieces(self, size: int) -> tuple[Piece, ...]:
        """The pieces in the module's own parameter, or its gradient, of this size: a part, or after gathering all."""
        if size == self.held:
            return (Piece(path=self.path, shard=self.range(self.held_first, self.held)),) if size else ()
        return (Piece(path=self.path, shard=self.range(0, self.size)),) if size == self.size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """A flat parameter: a leaf of autograd, which without `use_orig_params` the optimizer holds.

    Attributes:
        tensor: The local part, or the gathered whole: FSDP exchanges its data.
        name: Its name in `named_parameters`, with wrappers; empty if it is not registered.
        local_size: Number of elements of the local part, with padding.
        members: The parameters in it.
    """

    tensor: nn.Parameter
    name: str
    local_size: int
    members: tuple[Member, ...]

    def pieces(self, size: int) -> tuple[Piece, ...]:
        """The pieces in a tensor of this size that is laid out like the flat one."""
        if size == self.local_size:
            return tuple(
                Piece(path=one.path, first=one.local_first, shard=one.range(one.held_first, one.held))
                for one in self.members
                if one.held
            )
        return tuple(Piece(path=one.path, first=one.first, shard=one.range(0, one.size)) for one in self.members)


class FlatParameters:
    """All flat parameters of a model.

    Args:
        found: The flat parameters.
    """

    def __init__(self, found: Sequence[FlatParameter]) -> None:
        self._found = tuple(found)
        self._pieces: dict[int, Callable[[int], tuple[Piece, ...]]] = {}
        for one in self._found:
            self._pieces[id(one.tensor)] = one.pieces
            self._pieces.update(
                (id(member.parameter), member.pieces) for member in one.members if member.parameter is not None
            )

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[FlatParameter]:
        return iter(self._found)

    def pieces_of(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """The pieces that a flat parameter, or a module's own one, holds now; None for any other tensor.

        Args:
            parameter: A tensor of an optimizer, or a leaf of autograd.
            size: Number of elements of its gradient, to get the pieces of the gradient.
        """
        pieces = self._pieces.get(id(parameter))
        return None if pieces is None else pieces(parameter.numel() if size is None else size)


def find_flat_parameters(model: nn.Module) -> list[FlatParameter]:
    """The flat parameters of a model. Imports nothing: if there is one, FSDP is loaded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [
        _flat_parameter(name, layout)
        for name, module in modules_by_name(model).items()
        if isinstance(module, fsdp.FullyShardedDataParallel) and (layout := flat_layout(module)) is not None
    ]


def _flat_parameter(name: str, flat: FlatLayout) -> FlatParameter:
    owner = _joined(name, "_fsdp_wrapped_module")
    further: dict[str, list[str]] = {}
    for shared in flat.shared:
        first = _joined(shared.prim_module_name, shared.prim_param_name)
        further.setdefault(first, []).append(_joined(shared.module_name, shared.param_name))
    parameters: Sequence[Any] = flat.parameters or [None] * len(flat.names)
    places = zip(flat.names, flat.shapes, _starts(flat), flat.ranges, parameters, strict=True)
    return FlatParameter(
        tensor=flat.tensor,
        name="" if flat.parameters is not None else f"{owner}.{FLAT_PARAMETER}",
        local_size=flat.local_size,
        members=tuple(
            Member(
                path=canonical_path(_joined(owner, path)),
                others=tuple(canonical_path(_joined(owner, other)) for other in further.get(path, ())),
                shape=tuple(shape),
                first=first,
                local_first=place.offset_in_shard or 0,
                held_first=place.intra_param_start_idx or 0,
                held=place.numel_in_shard or 0,
                parameter=parameter,
            )
            for path, shape, first, place, parameter in places
        ),
    )


def _starts(flat: FlatLayout) -> Iterator[int]:
    """The position of each parameter in the gathered tensor. There may be padding between parameters."""
    start = 0
    for size, is_padding in flat.padded:
        if not is_padding:
            yield start
        start += int(size)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
