"""Teacher forcing: each tensor of a run is overwritten by another run's after it has been observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traindiff.core.observation import RECOMPUTED, Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import number
from traindiff.storage import Recording, StepObservations

Load = Callable[[], NDArray[Any] | None]
"""Reads the elements of a part; None if they were not kept."""


def elements_of(wanted: Shard, parts: Sequence[tuple[Shard, Load]]) -> NDArray[Any] | None:
    """The elements of `wanted`, in its shape; None if the parts do not have all of them.

    Args:
        wanted: Of the same global tensor.
        parts: Parts of it, in any order. They may overlap, with the same elements in the overlap.
    """
    for shard, load in parts:
        if (shard.shape, shard.offset, shard.spacing) == (wanted.shape, wanted.offset, wanted.spacing):
            found = load()
            return None if found is None else found.reshape(wanted.shape)
    shape = _whole_shape([wanted, *(shard for shard, _ in parts)])
    if shape is None:
        return None
    values: NDArray[Any] | None = None
    known = np.zeros(shape, dtype=bool)
    for shard, load in parts:
        if _at(known, shard).all():
            continue  # a copy
        found = load()
        if found is None:
            return None
        if values is None:
            values = np.zeros(shape, dtype=found.dtype)
        _put(values, shard, found)
        _put(known, shard, np.True_)
    if values is None or not _at(known, wanted).all():
        return None
    return _at(values, wanted).reshape(wanted.shape)


def _whole_shape(shards: Sequence[Shard]) -> tuple[int, ...] | None:
    """Shape of the global tensor with all rows of the parts; None if they are parts of different tensors."""
    inner = {shard.global_shape[1:] if shard.batched else shard.global_shape for shard in shards}
    if len(inner) != 1 or len({shard.batched for shard in shards}) != 1:
        return None
    if not shards[0].batched:
        return inner.pop()
    return (max(int(_rows(shard)[-1]) + 1 if shard.shape[0] else 0 for shard in shards), *inner.pop())


def _rows(shard: Shard) -> NDArray[np.int64]:
    """Numbers of a box's rows in the global tensor."""
    rows = np.arange(shard.shape[0])
    if shard.spacing is not None:
        together, apart = shard.spacing
        rows = rows // together * apart + rows % together
    return rows + shard.offset[0]


def _index(shard: Shard) -> tuple[Any, ...]:
    boxes = [slice(first, first + length) for first, length in zip(shard.offset, shard.shape, strict=True)]
    return tuple(boxes) if shard.spacing is None else (_rows(shard), *boxes[1:])


def _whole_as(shard: Shard, whole: NDArray[Any]) -> NDArray[Any]:
    """A view of the global tensor with the axes of a part; a part may be a range of all elements."""
    return whole if len(shard.shape) == len(shard.global_shape) else whole.reshape(-1)


def _at(whole: NDArray[Any], shard: Shard) -> NDArray[Any]:
    return np.asarray(_whole_as(shard, whole)[_index(shard)])


def _put(whole: NDArray[Any], shard: Shard, values: Any) -> None:
    _whole_as(shard, whole)[_index(shard)] = np.reshape(values, shard.shape) if np.ndim(values) else values


FORCED_PHASES = frozenset({"forward", "backward", "grad", "optimizer", "param"})
"""Phases whose tensors are overwritten. Both runs get the same batches and random state anyway."""

_EACH_MICRO_STEP = frozenset({"forward", "backward"})
"""Phases observed in each micro-step. The others are observed in the last micro-step of a run."""

_FORCED_STAGES = frozenset({"", "before", RECOMPUTED})

Perturbation = Callable[[Tensor, str], Tensor]
"""Rounds a tensor at random; its second argument names the observation."""


_Site = tuple[int, int, str, str, str, str, int, str]
"""Step, evaluation, phase, stage, path, slot, call and optimizer."""


class _Part(NamedTuple):
    seen: Observation
    within: StepObservations
    row: int


class ForcedValues:
    """The tensors of a recording, which replace those of a run that is being recorded.

    Each operation then computes from the numbers of the recorded run, and its result is observed before it is
    overwritten in turn. Errors neither accumulate nor cancel, so each operation is judged alone.

    Args:
        recording: A recording made with `detail="tensors"`.
        perturb: Applied to each value first, to measure how much an operation amplifies rounding in its inputs.

    Attributes:
        path: The recording.
        count: Number of tensors that were overwritten.
        not_forced: Why other tensors were not, by site, e.g. `transformer.wte output[0]`.
    """

    def __init__(self, recording: Recording, *, perturb: Perturbation | None = None) -> None:
        self.path = recording.path
        self._recording = recording
        self._perturb = perturb
        self._parts: dict[_Site, list[_Part]] = {}
        self._batches: dict[_Site, list[Shard]] = {}
        self._put_off: list[tuple[Tensor, Observation]] | None = None
        self._split_otherwise: set[int] = set()  # steps whose micro-batches are not the recorded ones
        self.count = 0
        self.not_forced: dict[str, str] = {}
        for rank in recording.ranks:
            for step in recording.steps(rank):
                for row, seen in enumerate(step.observations):
                    if seen.phase == "batch" and seen.shard.batched:
                        self._batches.setdefault(_site(seen), []).append(seen.shard)
                    if seen.phase in FORCED_PHASES and seen.stage in _FORCED_STAGES and not seen.unobserved:
                        self._parts.setdefault(_site(seen), []).append(_Part(seen, step, row))
        self._steps = {step for step, *_ in self._parts}

    def overwrite(self, tensor: Tensor, seen: Observation) -> None:
        """Overwrite a tensor that has just been observed with the recorded value, unseen by autograd.

        If the operation that made the tensor saved it for the backward pass, that reads the recorded value too.
        """
        recorded = self._batches.get(_site(seen), ()) if seen.shard.batched else ()
        if recorded and not any(_same_rows(shard, seen.shard) for shard in recorded):
            self._split_otherwise.add(seen.step)
        if seen.phase not in FORCED_PHASES or seen.stage not in _FORCED_STAGES or seen.step not in self._steps:
            return
        if self._put_off is not None:
            self._put_off.append((tensor, seen))
            return
        value, why = self._value(tensor, seen)
        if value is None and seen.stage == "before" and seen.step - 1 in self._steps:
            return  # the step before has left it, and was forced
        if value is None:
            self.not_forced.setdefault(f"{seen.path} {seen.slot}", why)
        else:
            tensor.data.copy_(value)
            self.count += 1

    @contextmanager
    def after(self, together: AbstractContextManager[None]) -> Iterator[None]:
        """Overwrite the tensors that are summarized together only afterwards."""
        self._put_off = []
        try:
            with together:
                yield
        finally:
            waiting, self._put_off = self._put_off, None
        for tensor, seen in waiting:
            self.overwrite(tensor, seen)

    def _value(self, tensor: Tensor, seen: Observation) -> tuple[Tensor | None, str]:
        """The value for a tensor, or None and why there is none."""
        parts = self._parts.get(_site(seen))
        if not parts:
            return None, "the recording has no such observation"
        if seen.merge != "shard" or any(part.seen.merge != "shard" for part in parts):
            return None, "it is a term of a sum"
        if seen.step in self._split_otherwise and not tensor.is_floating_point():
            return None, "whole numbers may be places in a micro-batch, and this one has other samples"
        if any(part.seen.scaled != seen.scaled for part in parts):
            return None, "a loss scale is in it in one of the runs only"
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            return None, "its elements share memory"
        found = elements_of(
            seen.shard, [(part.seen.shard, partial(self._load, part)) for part in self._usable(parts, seen)]
        )
        if found is None:
            return None, "the recording has no such rows of it"
        value = torch.from_numpy(np.array(found)).reshape(tensor.shape).to(tensor.dtype)
        if seen.factor != parts[0].seen.factor:  # ranks may have the gradient of their own mean
            value = value * (seen.factor / parts[0].seen.factor)
        if self._perturb is not None and tensor.is_floating_point():
            value = self._perturb(value, " ".join(map(str, (*_site(seen), seen.micro_step))))
        return value.to(tensor.device), ""

    def _usable(self, parts: Sequence[_Part], seen: Observation) -> Sequence[_Part]:
        """The parts that have the same elements as the observation where they overlap with it.

        If a step is split into other micro-batches, or among other ranks, the gradient of a tensor without a batch
        axis (e.g. a position embedding) is a sum over other samples, which the recording does not have.
        """
        shard = seen.shard
        if shard.batched and all(part.seen.shard.batched for part in parts):
            if not any(_same_rows(part.seen.shard, shard) for part in parts):
                self._split_otherwise.add(seen.step)
            return parts
        if seen.phase not in _EACH_MICRO_STEP:
            return parts
        if seen.step in self._split_otherwise:
            return ()
        return [part for part in parts if part.seen.micro_step == seen.micro_step]

    def _load(self, part: _Part) -> NDArray[Any] | None:
        seen, summary = part.seen, part.within.summaries[part.row]
        if seen.dtype.startswith("float8"):
            return None
        if int(summary["count"]) == 1 and not seen.shard.shape and seen.dtype.startswith("float"):
            return np.asarray(number(summary))  # the summary has the value; not for integers
        return self._recording.tensors(part.within, part.row).get("value")


def _same_rows(recorded: Shard, shard: Shard) -> bool:
    return recorded.offset[0] == shard.offset[0] and recorded.shape[0] == shard.shape[0]


def _site(seen: Observation) -> _Site:
    stage = "" if seen.stage == RECOMPUTED else seen.stage
    return seen.step, seen.evaluation, seen.phase, stage, seen.path, seen.slot, seen.call, seen.optimizer
