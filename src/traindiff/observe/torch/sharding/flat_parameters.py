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
from traindiff.core.torch_compat.training import FLAT_PARAMETER, FlatLayout, flat_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter of the model in a flat one.

    Attributes:
        path: Its canonical path.
        others: Canonical paths of further names of it (tied parameters).
        shape: Its shape.
        first: Where its elements begin in the gathered flat tensor.
        local_first: Where those that this rank holds begin in the local part of the flat tensor.
        held_first: Which of its elements, in row-major order, is the first that this rank holds.
        held: How many of its elements this rank holds; they follow each other.
        parameter: The module's own parameter, a view of the local part; None where the flat one has replaced it.
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

    @property
    def replaced(self) -> bool:
        """Whether the flat parameter has taken its place in the module."""
        return self.parameter is None

    def range(self, offset: int, size: int) -> Shard:
        """So many of its elements, in row-major order."""
        return Shard(shape=(size,), global_shape=self.shape, offset=(offset,))

    def pieces(self, size: int) -> tuple[Piece, ...]:
        """What the module's own parameter, or its gradient, of so many elements holds: a part, or gathered all."""
        if size == self.held:
            return (Piece(path=self.path, shard=self.range(self.held_first, self.held)),) if size else ()
        return (Piece(path=self.path, shard=self.range(0, self.size)),) if size == self.size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """A flat parameter: what autograd differentiates by, and without `use_orig_params` what the optimizer holds.

    Attributes:
        tensor: The local part, or the gathered whole: FSDP exchanges its data.
        name: What `named_parameters` calls it, with wrappers; empty where it is not registered.
        local_size: Elements of the local part, with padding.
        members: What it is made of.
    """

    tensor: nn.Parameter
    name: str
    local_size: int
    members: tuple[Member, ...]

    def pieces(self, size: int) -> tuple[Piece, ...]:
        """What a tensor of so many elements, laid out like the flat one, holds of the parameters."""
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

    def __init__(self, found: Sequence[FlatParameter] = ()) -> None:
        self._found = tuple(found)
        self._pieces: dict[int, Callable[[int], tuple[Piece, ...]]] = {}
        for one in self._found:
            self._pieces[id(one.tensor)] = one.pieces
            self._pieces.update((id(member.parameter), member.pieces) for member in one.members if not member.replaced)

    def __iter__(self) -> Iterator[FlatParameter]:
        return iter(self._found)

    def pieces_of(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """What a flat parameter, or a module's own one, holds now: FSDP exchanges the data. None for any other.

        Args:
            parameter: What an optimizer holds, or autograd differentiates by.
            size: Elements of its gradient, where that is asked for and may be of another size.
        """
        pieces = self._pieces.get(id(parameter))
        return None if pieces is None else pieces(parameter.numel() if size is None else size)


def find_flat_parameters(model: nn.Module) -> list[FlatParameter]:
    """The flat parameters of a model. Imports nothing: where there is one, FSDP is loaded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [
        _flat_parameter(name, layout)
        for name, module in model.named_modules()
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
    """Where each parameter begins in the gathered tensor: between them there may be padding."""
    start = 0
    for size, is_padding in flat.padded:
        if not is_padding:
            yield start
        start += int(size)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
