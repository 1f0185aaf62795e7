"""What a training carries from one step to the next, part by part as this rank holds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from traindiff.core.observation import MASTER
from traindiff.core.shards import Piece, Shard
from traindiff.observe.torch.hooks.context import elements
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.sharding.deepspeed_step import EngineOptimizerTap

VALUE, BUFFER = "value", "buffer"


class StateKey(NamedTuple):
    """A tensor that a training carries: of which parameter or buffer, and what of it."""

    path: str
    slot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """What this rank holds of such a tensor.

    Attributes:
        key: Which tensor.
        shard: Which elements of it.
        tensor: Their values, in the shape of the shard.
        write: Has the training go on with other values.
    """

    key: StateKey
    shard: Shard
    tensor: Tensor
    write: Callable[[Tensor], None]


def state_parts(targets: Targets, followed: Mapping[str, OptimizerTap]) -> list[StatePart]:
    """Parameters, buffers, and what optimizers keep, master weights included. Calls no collective.

    Args:
        targets: What is observed of a training.
        followed: Its optimizers, by name.
    """
    with torch.no_grad():
        found = [part for path in targets.parameters for part in _of_parameter(path, targets)]
        for path, name in targets.buffers.items():
            found += _of_tensor(targets.root.get_buffer(name), StateKey(path, BUFFER), targets)
        for tap in followed.values():
            for _, tensor, pieces in tap.held():
                if isinstance(tap, EngineOptimizerTap):
                    found += _of_pieces(tensor, pieces, MASTER, targets)
                found += _of_state(tap.state_of(tensor), tensor, pieces, targets)
    return [part for part in found if part.shard.size]


def _of_parameter(path: str, targets: Targets) -> Iterator[StatePart]:
    holder: Any = targets.parameters[path]
    pieces = [piece for piece in targets.pieces_of(holder) or () if piece.path == path]
    yield from _of_pieces(holder, pieces, VALUE, targets)
    if hasattr(holder, "ds_tensor") and holder.numel() == holder.ds_numel > 0:  # ZeRO stage 3 keeps it gathered, too
        whole = holder.detach().view(tuple(holder.ds_shape))
        yield _part(StateKey(path, VALUE), Shard.whole(tuple(whole.shape)), whole)


def _of_pieces(tensor: Tensor, pieces: Sequence[Piece], slot: str, targets: Targets) -> Iterator[StatePart]:
    for piece in pieces:
        key = StateKey(piece.path, slot)
        if piece.shard is None:
            yield from _of_tensor(tensor, key, targets)
        else:
            yield _part(key, piece.shard, elements(tensor, piece.first, piece.shard))


def _of_tensor(tensor: Tensor, key: StateKey, targets: Targets) -> Iterator[StatePart]:
    layout = targets.layout
    region = layout.region_of_parameter(tensor, path=key.path, phase="param")
    whole = Shard.whole(tuple(tensor.shape) if region is None else region.shape)
    for part in layout.local_shards(tensor, whole, "shard", phase="param", region=region):
        yield _part(key, part.shard, part.tensor.detach())


def _of_state(
    state: Mapping[str, Any], tensor: Tensor, pieces: Sequence[Piece], targets: Targets
) -> Iterator[StatePart]:
    for slot, value in state.items():
        if isinstance(value, Tensor) and value.numel() == tensor.numel() and not (not value.dim() and tensor.dim()):
            yield from _of_pieces(value, pieces, slot, targets)
        elif isinstance(value, Tensor):
            for piece in pieces:
                yield _part(StateKey(piece.path, slot), Shard.whole(tuple(value.shape)), value.detach())
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and isinstance(state, MutableMapping):
            for piece in pieces:
                number = torch.tensor(value, dtype=torch.float64)
                write = partial(_write_number, state, slot, type(value))
                yield StatePart(key=StateKey(piece.path, slot), shard=Shard.whole(()), tensor=number, write=write)


def _part(key: StateKey, shard: Shard, tensor: Tensor) -> StatePart:
    return StatePart(key=key, shard=shard, tensor=tensor, write=partial(_copy, tensor))


def _copy(target: Tensor, values: Tensor) -> None:
    target.copy_(values.view(target.shape))


def _write_number(state: MutableMapping[str, Any], slot: str, kind: type[Any], values: Tensor) -> None:
    state[slot] = kind(values.item())


def cut(whole: Tensor, shard: Shard) -> Tensor:
    """The elements of a tensor that a shard of it has; a view where that can be."""
    if len(shard.offset) != len(shard.global_shape):  # a flat range
        return whole.reshape(-1)[shard.offset[0] : shard.offset[0] + math.prod(shard.shape)]
    return whole[tuple(slice(first, first + length) for first, length in zip(shard.offset, shard.shape, strict=True))]
