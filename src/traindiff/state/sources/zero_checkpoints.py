"""ZeRO's partitions, stages 1 to 3: float32 parameters of a model-parallel rank, merged over its data-parallel ranks.

The layout is that of `deepspeed.utils.zero_to_fp32`. Stages 1 and 2 lay the parameters of a group one after the other
and cut the whole into one partition per rank; stage 3 cuts each parameter into equal parts, the last one padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.sources.pickles import Record, is_shape
from traindiff.state.sources.torch_files import MOST_VALUES, TorchFile, archive_of, shown_key
from traindiff.state.stored import Part, Place, Role, StoredTensor, check_parts, unreadable

MOST_RANKS = 1 << 16
"""Limit for the ranks of a checkpoint."""


def of_partitions(folder: Folder, optimizers: Mapping[int, str], models: Mapping[int, str]) -> dict[str, StoredTensor]:
    """The tensors of one model-parallel rank, by name: parameters, buffers, and what the optimizer keeps of them.

    Args:
        folder: The directory.
        optimizers: The files `*_optim_states.pt`, by data-parallel rank.
        models: The files `*_model_states.pt`, likewise.

    Raises:
        CheckpointError: A rank's file is missing or damaged, or the partitions do not fit the parameters' shapes.
    """
    ranks = _ranks(folder, optimizers)
    stage = ranks[0].stage
    archives = [archive_of(folder, name) for name in (models.values() if stage == 3 else [min(models.values())])]
    first = _mapping(archives[0].value, archives[0].where)
    groups = first.get("param_shapes")
    if isinstance(groups, Mapping):
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(one, Mapping) for one in groups):
        raise unreadable(archives[0].where, 'it has no "param_shapes"')
    if sum(map(len, groups)) > MOST_VALUES:
        raise unreadable(archives[0].where, f"it has more than {MOST_VALUES} shapes")
    found = _frozen(archives, first, sharded=stage == 3)
    for key in ("", *ranks[0].states):
        for number, shapes in enumerate(groups):
            pieces = [rank.flat(number, key) for rank in ranks]
            if all(piece is not None for piece in pieces):
                flat = [piece for piece in pieces if piece is not None]
                found |= dict(_trained(shapes, flat, key, where=archives[0].where, sharded=stage == 3))
    shared = first.get("shared_params")
    for name, other in shared.items() if isinstance(shared, Mapping) else ():
        if other in found:
            found[printable(shown_key(name))] = _named(found[other], printable(shown_key(name)))
    return found | dict(_whole(archives[0], first, found, sharded=stage == 3))


def _ranks(folder: Folder, files: Mapping[int, str]) -> list[_Rank]:
    """The files of the optimizer of all ranks.

    Raises:
        CheckpointError: One is missing.
    """
    ranks = [_Rank(archive_of(folder, name)) for name in files.values()]
    count = ranks[0].num_ranks
    missing = [number for number in range(min(count, MOST_RANKS)) if number not in files]
    if missing or len(ranks) != count:
        name = next(iter(files.values()))
        what = f"{quoted(name)} says that {count} ranks have saved it, and there are files of {len(ranks)}"
        which = f": that of rank {missing[0]} is missing" if missing else ""
        raise unreadable(folder.root, what + which)
    return ranks


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise unreadable(where, "it holds no dict")
    return value


class _Rank:
    """The file of a rank's optimizer.

    Args:
        archive: The file.

    Attributes:
        stage: Of ZeRO.
        num_ranks: Number of ranks that share the partitions.
        states: Names of what the optimizer keeps of each parameter, e.g. `exp_avg`.

    Raises:
        CheckpointError: It is not one of ZeRO.
    """

    def __init__(self, archive: TorchFile) -> None:
        self._archive = archive
        content = _mapping(archive.value, archive.where).get("optimizer_state_dict")
        stage = content.get("zero_stage") if isinstance(content, Mapping) else None
        if isinstance(stage, Record) and stage.name.endswith(".ZeroStageEnum") and len(stage.arguments) == 1:
            stage = stage.arguments[0]
        if not isinstance(content, Mapping) or stage not in (1, 2, 3):
            raise unreadable(archive.where, "it is no file of ZeRO: it has no zero_stage from 1 to 3")
        self.stage: int = stage
        counts = content.get("partition_count")
        most = max(counts) if isinstance(counts, list) and counts else counts
        if type(most) is not int or not 0 < most <= MOST_RANKS:
            raise unreadable(archive.where, "it does not say how many ranks there are (partition_count)")
        self.num_ranks: int = most
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        groups = content.get(key)
        if not isinstance(groups, list):
            raise unreadable(archive.where, f"it has no {quoted(key)}")
        self._groups: list[Any] = groups
        self._states = _states(content, stage)
        first = self._states.get(0, {})
        self.states = [name for name in first if isinstance(name, str) and self.flat(0, name) is not None]

    def flat(self, group: int, key: str) -> StoredTensor | None:
        """The partition of a group: of the parameters, or of what the optimizer keeps under `key`; None without one."""
        if key:
            value = self._states.get(group, {}).get(key)
        else:
            value = self._groups[group] if group < len(self._groups) else None
        if isinstance(value, list) and len(value) == 1:  # the sub-groups of stage 3
            value = value[0]
        found = self._archive.tensor(value, f"{key or 'partition'} of group {group}")
        return found if found is not None and len(found.shape) == 1 else None


def _states(content: Mapping[Any, Any], stage: int) -> Mapping[Any, Mapping[Any, Any]]:
    """What the base optimizer keeps, by group."""
    inner = content.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    state = inner.get("state") if isinstance(inner, Mapping) else None
    found = dict(enumerate(state)) if isinstance(state, list) else state
    if not isinstance(found, Mapping):
        return {}
    return {group: one for group, one in found.items() if isinstance(one, Mapping)}


def _trained(
    shapes: Mapping[Any, Any], flat: Sequence[StoredTensor], key: str, *, where: str, sharded: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a group from the partitions of all ranks, in the order of the ranks.

    Raises:
        CheckpointError: A shape is none, or the partitions are too short.
    """
    ends = [0]
    for one in flat:
        ends.append(ends[-1] + one.size)
    place = 0
    for path, shape in shapes.items():
        if not is_shape(shape):
            raise unreadable(where, f"the shape of {quoted(shown_key(path))} is none")
        size, own = prod(shape), printable(shown_key(path))
        name, role = (f"optimizer.state.{own}.{key}", "optimizer") if key else (own, "parameter")
        if sharded:
            each = -(-size // len(flat))
            spans = [(rank, place, max(0, min(each, size - rank * each))) for rank in range(len(flat))]
            place += each
        else:
            spans = []
            for rank in range(len(flat)):
                low, high = max(place, ends[rank]), min(place + size, ends[rank + 1])
                if low < high:
                    spans.append((rank, low - ends[rank], high - low))
            place += size
        yield name, _cut(name, role, shape, flat, spans, where)  # type: ignore[arg-type]


def _cut(
    name: str,
    role: Role,
    shape: tuple[int, ...],
    flat: Sequence[StoredTensor],
    spans: Sequence[tuple[int, int, int]],
    where: str,
) -> StoredTensor:
    """A tensor from ranges of flat tensors, given as (which, first element, number of elements)."""
    parts, first = [], 0
    for rank, low, count in spans:
        if low + count > flat[rank].size:
            raise unreadable(where, f"the partition of rank {rank} ends before {quoted(name)} does")
        if count:
            find = partial(_shifted, flat[rank], low)
            parts.append(Part(offset=(first,), shape=(count,), find=find))
            first += count
    dtype = flat[0].dtype
    return check_parts(where, StoredTensor(name=name, dtype=dtype, shape=shape, parts=tuple(parts), role=role))


def _shifted(flat: StoredTensor, first: int) -> Place:
    whole = flat.parts[0].find()
    if whole.strides is not None:
        raise unreadable(whole.content.folder.path(whole.content.name), "a partition in it has gaps")
    return replace(whole, content=whole.content.after(first * ITEM_BYTES[flat.dtype]))


def _whole(
    archive: TorchFile, content: Mapping[Any, Any], known: Mapping[str, StoredTensor], *, sharded: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """What the module has whole: buffers; in stages 1 and 2 also parameters that are not trained."""
    names, module = content.get("buffer_names"), content.get("module")
    buffers = names if isinstance(names, list | set) else ()
    for name, value in module.items() if isinstance(module, Mapping) else ():
        own = printable(shown_key(name))
        if name in buffers or (not sharded and own not in known):
            tensor = archive.tensor(value, own)
            if tensor is not None:
                yield own, tensor


def _frozen(archives: Sequence[TorchFile], first: Mapping[Any, Any], *, sharded: bool) -> dict[str, StoredTensor]:
    """Parameters that are not trained: whole in stages 1 and 2, cut among the ranks in stage 3."""
    shapes = first.get("frozen_param_shapes")
    found: dict[str, StoredTensor] = {}
    for path, shape in shapes.items() if isinstance(shapes, Mapping) else ():
        name = printable(shown_key(path))
        pieces = []
        for archive in archives:
            held = _mapping(archive.value, archive.where).get("frozen_param_fragments")
            tensor = archive.tensor(held.get(path) if isinstance(held, Mapping) else None, name)
            if tensor is None or not is_shape(shape):
                raise unreadable(archive.where, f"it has no part of the frozen parameter {quoted(name)}")
            pieces.append(tensor)
        if not sharded:
            found[name] = pieces[0]
            continue
        size, each = prod(shape), -(-prod(shape) // len(pieces))
        spans = [(rank, 0, max(0, min(each, size - rank * each))) for rank in range(len(pieces))]
        found[name] = _cut(name, "parameter", shape, pieces, spans, archives[0].where)
    return found


def _named(tensor: StoredTensor, name: str) -> StoredTensor:
    return StoredTensor(name=name, dtype=tensor.dtype, shape=tensor.shape, parts=tensor.parts, role=tensor.role)
