"""Observations that repeat step after step: what is known of them is worked out once; the rest is one native call.

The slow way defines what is recorded: `Observations.emit` for each tensor. When it has run, `learned` keeps the rows
that it made. If tensors come again that look the same, their rows differ from these in the step, micro-step, evaluation
and order alone, and only the numbers are computed.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn, strided

from traindiff.core.kernels.registry import TABLES
from traindiff.core.kernels.rows import ROW_BYTES, Deferred, Rows
from traindiff.core.kernels.store import DeviceTable, SummaryStore
from traindiff.core.kernels.torch_arrays import addresses as addresses_of
from traindiff.core.kernels.torch_arrays import dtype_name
from traindiff.core.observation import Observation, is_of_evaluation
from traindiff.core.summary import empty
from traindiff.core.torch_compat.alike import looks_like
from traindiff.observe.common.progress import Progress
from traindiff.observe.torch.sharding.layout import Layout, kept_here

_MOST_ROWS = 8192
"""Rows that are summarized in one call, before it is looked how much memory they take."""

_NOTHING = empty().tobytes()
_STEP, _MICRO_STEP, _ORDER, _EVALUATION = (
    Observation._fields.index(name) for name in ("step", "micro_step", "order", "evaluation")
)
PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that are what they seem."""


class Repeated:
    """What is known of a sequence of tensors that a tap hands over in each step; the tap keeps it."""

    __slots__ = ("plan",)

    def __init__(self) -> None:
        self.plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Consecutive rows of a plan.

    Attributes:
        first: Number of the first of them in the plan, and `count` of them.
        table: The kernel's table of them.
        on_devices: What devices know of those that are summarized there.
        others: Rows of tensors that neither reads in one stretch, by their place in the part.
        columns: Their observations by column, without those that differ from step to step.
        of_evaluation: Whether each belongs to one evaluation of the loss.
    """

    first: int
    count: int
    table: Any
    on_devices: Sequence[DeviceTable]
    others: tuple[tuple[int, Observation], ...]
    columns: tuple[Any, ...]
    of_evaluation: tuple[bool, ...]

    def columns_in(self, *, step: int, micro_step: int, evaluation: int, order: int) -> Sequence[Sequence[Any]]:
        """The rows in a step by column; the first one has the given place in the order."""
        columns = [*self.columns]
        columns[_STEP], columns[_MICRO_STEP] = (step,) * self.count, (micro_step,) * self.count
        columns[_ORDER] = range(order, order + self.count)
        columns[_EVALUATION] = [evaluation * belongs for belongs in self.of_evaluation]
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows that a sequence of tensors gives.

    Attributes:
        about: What else they depend on; the plan holds while it is equal.
        layout: How this rank's tensors lay; the plan holds for this object.
        looks: Tells whether tensors look like those from which it was learned.
        absent: Places where there is no tensor, and a row that says why.
        optimizer: Whose steps the rows belong to.
        parts: The rows.
    """

    about: Any
    layout: Layout
    looks: Callable[[Sequence[Any]], bool]
    absent: tuple[int, ...]
    optimizer: str
    parts: tuple[_Part, ...]

    def addresses(self, tensors: Sequence[Tensor | None], about: Any) -> array[int] | None:
        """The address of each tensor, 0 where there is none; None if the tensors do not give these rows."""
        if about != self.about:
            return None
        present: Sequence[Any] = tensors
        if self.absent:
            if tuple(place for place, one in enumerate(tensors) if one is None) != self.absent:
                return None
            present = [one for one in tensors if one is not None]
        if not self.looks(present) or (found := addresses_of(present)) is None:
            return None
        for place in self.absent:
            found.insert(place, 0)
        return found

    def write(
        self, part: _Part, tensors: Sequence[Tensor | None], addresses: array[int], rows: Rows, store: SummaryStore
    ) -> Sequence[int]:
        """Add the summaries of a part to `rows`; the store makes those that the table does not.

        Returns:
            The addresses of the rows.
        """
        if part.count != len(addresses):
            addresses = addresses[part.first : part.first + part.count]
        others = [(place, self._other(seen, tensors[part.first + place], store)) for place, seen in part.others]
        first = rows.place(part.count)
        part.table.summarize(addresses, first)
        for place, summary in others:
            if isinstance(summary, Deferred):
                rows.arrives_as(first + place * ROW_BYTES, summary)
            else:
                ctypes.memmove(first + place * ROW_BYTES, summary, ROW_BYTES)
        if part.on_devices:
            store.add_tables(part.on_devices, np.frombuffer(addresses, dtype=np.int64), rows, first)
        return range(first, first + part.count * ROW_BYTES, ROW_BYTES)

    @staticmethod
    def _other(seen: Observation, tensor: Tensor | None, store: SummaryStore) -> bytes | Deferred:
        if tensor is None:
            return _NOTHING
        found = store.add(tensor, seen.shard)
        return found if isinstance(found, Deferred) else found.tobytes()


def learned(
    tensors: Sequence[Tensor | None],
    rows: Sequence[Observation],
    about: Any,
    *,
    progress: Progress,
    layout: Layout,
    store: SummaryStore,
) -> Plan | None:
    """The plan of some tensors and the rows that they have just given; None if they may give others next time."""
    present = [one for one in tensors if one is not None]
    if not rows or len(rows) != len(tensors) or not all(map(_is_plain, present)):
        return None
    kernel = next((found for one in TABLES if (found := one.load()) is not None), None)
    looks = looks_like(present)
    if kernel is None or looks is None or not all(map(_is_of, rows, tensors)):
        return None
    step, first = progress.number_of(rows[0].optimizer), rows[0].order
    now = (step, progress.micro_step, rows[0].optimizer)
    for place, seen in enumerate(rows):
        evaluation = progress.evaluation if is_of_evaluation(seen.phase, seen.stage) else 0
        if (seen.step, seen.micro_step, seen.optimizer) != now or seen.evaluation != evaluation:
            return None
        if seen.order != first + place:
            return None
    parts = [
        _part(start, tensors[start : start + _MOST_ROWS], rows[start : start + _MOST_ROWS], kernel, store)
        for start in range(0, len(rows), _MOST_ROWS)
    ]
    absent = tuple(place for place, one in enumerate(tensors) if one is None)
    return Plan(
        about=about, layout=layout, looks=looks, absent=absent, optimizer=rows[0].optimizer, parts=tuple(parts)
    )  # fmt: skip


def _part(
    first: int, tensors: Sequence[Tensor | None], rows: Sequence[Observation], kernel: Any, store: SummaryStore
) -> _Part:
    from traindiff.core.kernels.cpu.summarize import reads

    on_devices = store.tables(tensors, [seen.shard for seen in rows])
    on_device = {place for one in on_devices for place in one.places.tolist()}
    in_table = [
        place not in on_device
        and one is not None and reads(one) and one.is_contiguous() and kernel.is_one_stretch(seen.shard)
        for place, (one, seen) in enumerate(zip(tensors, rows, strict=True))
    ]  # fmt: skip
    entries = [(seen.dtype, seen.shard) if fast else None for seen, fast in zip(rows, in_table, strict=True)]
    return _Part(
        first=first,
        count=len(rows),
        table=kernel.Table(entries),
        on_devices=on_devices,
        others=tuple((n, rows[n]) for n, fast in enumerate(in_table) if not fast and n not in on_device),
        columns=tuple(zip(*rows, strict=True)),
        of_evaluation=tuple(is_of_evaluation(seen.phase, seen.stage) for seen in rows),
    )


def _is_plain(tensor: Tensor) -> bool:
    """True for a dense tensor that is on this rank as it is, and whose class has no further state."""
    if type(tensor) not in PLAIN or tensor.is_nested or tensor.layout is not strided:
        return False
    return tensor.device.type in ("cpu", "cuda") and kept_here(tensor)[0] is tensor


def _is_of(seen: Observation, tensor: Tensor | None) -> bool:
    """True if the row is that of all of the tensor; without a tensor, if it says why there is none."""
    if tensor is None:
        return bool(seen.unobserved)
    size = tensor.numel() * (1 + tensor.is_complex())
    return not seen.unobserved and seen.dtype == dtype_name(tensor) and seen.shard.size == size
