"""Reset the candidate to the baseline's state, even if the ranks divide the two differently."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from traindiff.analyse.merge.renames import Renaming
from traindiff.core.observation import MASTER
from traindiff.core.shards import Piece, Shard
from traindiff.core.site import label
from traindiff.observe.torch.hooks.context import elements
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.sharding.deepspeed_step import EngineOptimizerTap
from traindiff.run.lockstep.live_side import LiveSide
from traindiff.run.lockstep.ranks import Ranks

VALUE, BUFFER = "value", "buffer"


class StateKey(NamedTuple):
    """Names a tensor of a training's state: path of the parameter or buffer, and which of its tensors."""

    path: str
    slot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """The elements of such a tensor that this rank holds.

    Attributes:
        key: The tensor.
        shard: The elements.
        tensor: Their values, in the shape of the shard.
        write: Replaces the values in the training.
    """

    key: StateKey
    shard: Shard
    tensor: Tensor
    write: Callable[[Tensor], None]


def state_parts(targets: Targets, followed: Mapping[str, OptimizerTap]) -> list[StatePart]:
    """Parameters, buffers, and optimizer state with master weights. Calls no collective."""
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
    if hasattr(holder, "ds_tensor") and holder.numel() == holder.ds_numel > 0:  # gathered by ZeRO stage 3
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
    """The elements of a tensor that belong to a shard; a view if possible."""
    if len(shard.offset) != len(shard.global_shape):  # a flat range
        return whole.reshape(-1)[shard.offset[0] : shard.offset[0] + math.prod(shard.shape)]
    return whole[tuple(slice(first, first + length) for first, length in zip(shard.offset, shard.shape, strict=True))]


def set_back(baseline: LiveSide, candidate: LiveSide, ranks: Ranks, rename: Renaming) -> list[str]:
    """Give the candidate the baseline's parameters, buffers, master weights and optimizer state, but no settings.

    A rank copies from its own part of the baseline if that is enough. Otherwise the missing parts are gathered on the
    CPU, tensor by tensor; this is rare.

    Returns:
        Sites that only the candidate has.
    """
    held = _by_key(baseline)
    wanted = {StateKey(rename(key.path), key.slot): parts for key, parts in _by_key(candidate).items()}
    told: list[_About] = [pickle.loads(one) for one in ranks.everyone(pickle.dumps(_about(held, wanted)))]
    lacking: dict[StateKey, None] = {}
    with torch.no_grad():
        for key in sorted({key for about in told for key in about.wanted}):
            source = next((one for one in _sources(key) if any(one in about.held for about in told)), None)
            if source is None:
                lacking.setdefault(key)
                continue
            whole = _whole(source, held.get(source, ()), told, ranks, key)
            for part in wanted.get(key, ()):
                part.write(_cut_of(part.shard, whole, held.get(source, ())))
    return [label(key.path, key.slot) for key in lacking]


def _by_key(side: LiveSide) -> dict[StateKey, list[StatePart]]:
    found: dict[StateKey, list[StatePart]] = {}
    for part in state_parts(side.targets, side.recorder.followed):
        found.setdefault(part.key, []).append(part)
    return found


def _sources(key: StateKey) -> tuple[StateKey, ...]:
    """The baseline's tensors that may serve for a key: its parameters are its master weights, if it has no others."""
    return (key, StateKey(key.path, VALUE)) if key.slot == MASTER else (key,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """A rank's parts.

    Attributes:
        held: The parts of the baseline's tensors that the rank holds.
        dtypes: Their dtypes.
        wanted: The candidate's keys there; for each source of a key, True if the rank itself holds enough.
    """

    held: Mapping[StateKey, Sequence[Shard]]
    dtypes: Mapping[StateKey, torch.dtype]
    wanted: Mapping[StateKey, Sequence[bool]]


def _about(held: Mapping[StateKey, Sequence[StatePart]], wanted: Mapping[StateKey, Sequence[StatePart]]) -> _About:
    def suffices(source: StateKey, parts: Sequence[StatePart]) -> bool:
        return all(_covering(part.shard, held.get(source, ())) is not None for part in parts)

    return _About(
        held={key: [part.shard for part in parts] for key, parts in held.items()},
        dtypes={key: parts[0].tensor.dtype for key, parts in held.items()},
        wanted={key: [suffices(source, parts) for source in _sources(key)] for key, parts in wanted.items()},
    )


def _whole(
    source: StateKey, own: Sequence[StatePart], told: Sequence[_About], ranks: Ranks, key: StateKey
) -> Tensor | None:
    """One of the baseline's tensors, complete, on every rank; None if each rank has what it needs of it."""
    number = _sources(key).index(source)
    if all(about.wanted[key][number] for about in told if key in about.wanted):
        return None
    given: set[Shard] = set()  # one copy is enough
    by_rank: list[list[Shard]] = []
    for about in told:
        fresh = [shard for shard in dict.fromkeys(about.held.get(source, ())) if shard not in given]
        given.update(fresh)
        by_rank.append(fresh)
    dtype = next(about.dtypes[source] for about in told if source in about.dtypes)
    parts = {part.shard: part.tensor for part in own}
    mine = [parts[shard].detach().reshape(-1).cpu().contiguous() for shard in by_rank[ranks.rank]]
    joined = torch.cat(mine) if mine else torch.empty(0, dtype=dtype)
    messages = ranks.everyone(joined.view(torch.uint8).numpy().tobytes() if len(joined) else b"")
    (shape,) = {shard.global_shape for shards in by_rank for shard in shards}
    whole = torch.zeros(shape, dtype=dtype)
    for message, shards in zip(messages, by_rank, strict=True):
        values = torch.frombuffer(bytearray(message), dtype=dtype) if message else torch.empty(0, dtype=dtype)
        for shard, part in zip(shards, values.split([shard.size for shard in shards]), strict=True):
            place = cut(whole, shard)
            place.copy_(part.view(place.shape))
    return whole


def _cut_of(shard: Shard, whole: Tensor | None, own: Sequence[StatePart]) -> Tensor:
    """The values of a shard, from the whole tensor, or from this rank's own parts."""
    if whole is not None:
        return cut(whole, shard).reshape(shard.shape)
    part = _covering(shard, own)
    assert part is not None
    return part.tensor if part.shard == shard else cut(part.tensor, shard).reshape(shard.shape)


def _covering(shard: Shard, own: Iterable[StatePart]) -> StatePart | None:
    """This rank's part that contains a shard: the same shard, or the whole tensor."""
    same = (part for part in own if part.shard == shard or part.shard == Shard.whole(shard.global_shape))
    return next(same, None)
