"""Set the candidate back to the baseline's state, also where ranks hold other parts of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from traindiff.analyse.merge.renames import Renaming
from traindiff.core.observation import MASTER
from traindiff.core.shards import Shard
from traindiff.core.site import label
from traindiff.run.lockstep.live_side import LiveSide
from traindiff.run.lockstep.ranks import Ranks
from traindiff.run.lockstep.state_parts import VALUE, StateKey, StatePart, cut

Where = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A shard as it is told: shape, shape of the whole, offset."""


def set_back(baseline: LiveSide, candidate: LiveSide, ranks: Ranks, rename: Renaming) -> list[str]:
    """Give the candidate the baseline's parameters, buffers, master weights and optimizer state; no settings.

    What a rank's own part of the baseline covers is copied there. The rest is gathered tensor by tensor, on the CPU;
    that is rare.

    Args:
        baseline: The baseline.
        candidate: The candidate.
        ranks: The ranks.
        rename: Turns the candidate's paths into the baseline's.

    Returns:
        What the candidate has and the baseline has not.
    """
    held = _by_key(baseline.state())
    wanted = {StateKey(rename(key.path), key.slot): parts for key, parts in _by_key(candidate.state()).items()}
    told = [_parsed(one) for one in ranks.everyone(json.dumps(_about(held, wanted)).encode())]
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


def _by_key(parts: Iterable[StatePart]) -> dict[StateKey, list[StatePart]]:
    found: dict[StateKey, list[StatePart]] = {}
    for part in parts:
        found.setdefault(part.key, []).append(part)
    return found


def _sources(key: StateKey) -> tuple[StateKey, ...]:
    """Where the baseline may have what a key asks for: its parameters are master weights, where it has no others."""
    return (key, StateKey(key.path, VALUE)) if key.slot == MASTER else (key,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """What a rank says of its parts.

    Attributes:
        held: Which parts of the baseline's tensors it holds.
        dtypes: The dtypes of these.
        wanted: What the candidate there wants; for each source of it, whether the rank itself holds enough.
    """

    held: Mapping[StateKey, Sequence[Where]]
    dtypes: Mapping[StateKey, str]
    wanted: Mapping[StateKey, Sequence[bool]]


def _about(held: Mapping[StateKey, Sequence[StatePart]], wanted: Mapping[StateKey, Sequence[StatePart]]) -> Any:
    covered = []
    for key, parts in wanted.items():
        enough = [
            all(_covering(part.shard, held.get(source, ())) is not None for part in parts) for source in _sources(key)
        ]
        covered.append([*key, enough])
    return {
        "held": [[*key, [_where(part.shard) for part in parts], _name(parts[0].tensor)] for key, parts in held.items()],
        "wanted": covered,
    }


def _parsed(message: bytes) -> _About:
    about = json.loads(message)
    return _About(
        held={StateKey(path, slot): [_as_where(one) for one in places] for path, slot, places, _ in about["held"]},
        dtypes={StateKey(path, slot): name for path, slot, _, name in about["held"]},
        wanted={StateKey(path, slot): enough for path, slot, enough in about["wanted"]},
    )


def _whole(
    source: StateKey, own: Sequence[StatePart], told: Sequence[_About], ranks: Ranks, key: StateKey
) -> Tensor | None:
    """All of one of the baseline's tensors, on every rank; None where each rank has what it needs of it."""
    number = _sources(key).index(source)
    if all(about.wanted[key][number] for about in told if key in about.wanted):
        return None
    given: set[Where] = set()  # of copies, one is enough
    by_rank: list[list[Where]] = []
    for about in told:
        fresh = [where for where in dict.fromkeys(about.held.get(source, ())) if where not in given]
        given.update(fresh)
        by_rank.append(fresh)
    name = next(about.dtypes[source] for about in told if source in about.dtypes)
    dtype = getattr(torch, name)
    parts = {_as_where(_where(part.shard)): part.tensor for part in own}
    mine = [parts[where].detach().reshape(-1).cpu().contiguous() for where in by_rank[ranks.rank]]
    joined = torch.cat(mine) if mine else torch.empty(0, dtype=dtype)
    messages = ranks.everyone(joined.view(torch.uint8).numpy().tobytes() if len(joined) else b"")
    (shape,) = {where[1] for places in by_rank for where in places}
    whole = torch.zeros(shape, dtype=dtype)
    for message, places in zip(messages, by_rank, strict=True):
        values = torch.frombuffer(bytearray(message), dtype=dtype) if message else torch.empty(0, dtype=dtype)
        first = 0
        for where in places:
            size = prod(where[0])
            shard = Shard(shape=where[0], global_shape=where[1], offset=where[2])
            place = cut(whole, shard)
            place.copy_(values[first : first + size].view(place.shape))
            first += size
    return whole


def _cut_of(shard: Shard, whole: Tensor | None, own: Sequence[StatePart]) -> Tensor:
    """The values of a shard, from the whole tensor, or from what this rank holds itself."""
    if whole is not None:
        return cut(whole, shard).reshape(shard.shape)
    part = _covering(shard, own)
    assert part is not None
    return part.tensor if part.shard == shard else cut(part.tensor, shard).reshape(shard.shape)


def _covering(shard: Shard, own: Iterable[StatePart]) -> StatePart | None:
    """What holds a shard on this rank: the same shard, or all of the tensor."""
    same = (part for part in own if part.shard == shard or part.shard == Shard.whole(shard.global_shape))
    return next(same, None)


def _where(shard: Shard) -> list[list[int]]:
    return [list(shard.shape), list(shard.global_shape), list(shard.offset)]


def _as_where(value: Sequence[Sequence[int]]) -> Where:
    shape, whole, offset = value
    return tuple(shape), tuple(whole), tuple(offset)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
