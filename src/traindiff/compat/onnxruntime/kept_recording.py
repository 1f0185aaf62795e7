"""The recording beside the files: what `traindiff compare` reads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from traindiff.compat.imported import rank_content, run_content
from traindiff.compat.onnxruntime.importing import SETTINGS
from traindiff.compat.onnxruntime.statistics import NUM_SAMPLES, Direction, Statistics
from traindiff.core.kernels.parts import parts_of
from traindiff.core.kernels.rows import resolved
from traindiff.core.kernels.store import SummaryStore
from traindiff.core.kernels.torch_arrays import as_real, check_supported, dtype_name, shape_of
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import empty, extremes
from traindiff.core.torch_compat.training import print_options
from traindiff.errors import TraindiffWarning
from traindiff.observe.torch.session.environment import describe
from traindiff.storage import Gap, RecordingWriter

if TYPE_CHECKING:
    from traindiff.compat.onnxruntime.manager import Model


def measured(
    tensor: Tensor, summaries: SummaryStore, *, name: str, direction: Direction, depth: int
) -> tuple[Statistics, np.void]:
    """The numbers for a tensor's file, and its summary, which `summaries` makes. Waits for the tensor's device.

    Moments are added up in float64. As in torch, extremes and mean are NaN where an element is, and the mean is
    infinite, or NaN, where some are.

    Raises:
        UnsupportedTensorError: It has no dense elements that could be read.
    """
    check_supported(tensor)
    real = as_real(tensor)
    shard = Shard.whole(tuple(real.shape))
    added = summaries.add(tensor, shard)
    summaries.end_step()
    summary: np.void = resolved([added])[0]
    count, num_nan = int(summary["count"]), int(summary["nan"])
    infinities = int(summary["negative_infinity"]), int(summary["positive_infinity"])
    total, squares = _moments(real, summary)
    mean = _mean(total, count, num_nan, infinities)
    minimum, maximum = extremes(summary)
    if count and not real.dtype.is_floating_point:
        minimum, maximum = int(minimum), int(maximum)
    num_negative, num_zero = int(summary["negative"]), int(summary["zero"])
    statistics = Statistics(
        name=name, direction=direction, depth=depth, shape=tuple(tensor.shape), dtype=dtype_name(tensor),
        minimum=minimum, maximum=maximum, mean=mean, std=_std(squares, mean, count),
        num_nan=num_nan, num_infinite=sum(infinities), num_negative=num_negative,
        num_positive=count - num_nan - num_negative - num_zero, num_zero=num_zero, samples=_samples(real),
    )  # fmt: skip
    return statistics, summary


def _moments(tensor: Tensor, summary: np.void) -> tuple[float, float]:
    """Sum, and sum of squares, of the elements that are finite."""
    if tensor.dtype.is_floating_point:
        return float(summary["sum"]), float(summary["sum_of_squares"])
    total = squares = 0.0  # summaries of whole numbers have neither
    for part, _ in parts_of(tensor, Shard.whole(tuple(tensor.shape))):
        values = part.to(torch.float64)
        total += float(values.sum())
        squares += float((values * values).sum())
    return total, squares


def _mean(total: float, count: int, num_nan: int, infinities: tuple[int, int]) -> float:
    if num_nan or not count or all(infinities):
        return math.nan
    if any(infinities):
        return -math.inf if infinities[0] else math.inf
    return total / count


def _std(squares: float, mean: float, count: int) -> float:
    """Standard deviation of a sample; NaN of fewer than two elements."""
    if count < 2 or not math.isfinite(mean) or not math.isfinite(squares):
        return math.nan
    return math.sqrt(max(0.0, squares / count - mean * mean) * count / (count - 1))


def _samples(tensor: Tensor) -> str:
    """The first elements as the original prints them."""
    flat = Shard(shape=(tensor.numel(),), global_shape=(tensor.numel(),), offset=(0,))
    first, _ = next(parts_of(tensor, flat))
    with _printing(precision=6, linewidth=128, threshold=NUM_SAMPLES):
        return str(first.reshape(-1)[:NUM_SAMPLES].cpu())


@contextmanager
def _printing(**options: Any) -> Iterator[None]:
    """Print tensors in a certain way, and then as before."""
    before = print_options()
    torch.set_printoptions(**options)
    try:
        yield
    finally:
        torch.set_printoptions(**before)


_LATE = 2
"""A step with gradients is written when the one after the next has begun: its backward pass has ended by then."""

HELD = 16
"""Steps without gradients are held so many steps: one backward pass may come after several forward passes."""

Rows = list[tuple[Observation, Any]]


class KeptRecording:
    """A recording of activations only. The caller passes them one by one; `model` must know their sites by then."""

    def __init__(self, path: str, model: Model, *, rank: int, world_size: int, overwrite: bool) -> None:
        self._model = model
        self._world_size = world_size
        self._steps: dict[int, Rows] = {}
        self._next = 0
        self._has_warned = False
        run = run_content(world_size, settings=SETTINGS, **describe())
        self._writer = RecordingWriter(path, run=run, rank=rank, world_size=world_size, overwrite=overwrite)

    def keep(
        self, tensor: Tensor, summary: np.void | None, *, name: str, step: int, call: int, phase: str, why: str = ""
    ) -> None:
        """Keep the summary of an activation, or of its gradient; where that is None, `why` there is none."""
        if step < self._next:
            message = (
                f"StatisticsSubscriber: gradients of step {step} came after more than {HELD} further steps. They are "
                "in its files and not in its recording. Run the backward pass before so many forward passes."
            )
            if not self._has_warned:
                warnings.warn(message, TraindiffWarning, stacklevel=2)
            self._has_warned = True
            return
        path, slot = self._model.sites.get(name, (name, "value"))
        shape = () if summary is None else shape_of(as_real(tensor))
        rows = self._steps.setdefault(step, [])
        rows.append(
            (
                Observation(
                    step=step, micro_step=0, optimizer="optimizer", phase=phase, stage="", path=path, slot=slot,
                    call=call, order=len(rows), dtype=dtype_name(tensor), shard=Shard.whole(shape), unobserved=why,
                ),
                empty() if summary is None else summary,
            )
        )  # fmt: skip
        self._write(latest=step)

    def give_up(self, reason: str, *, step: int) -> None:
        """Write the steps that have ended when a step failed, if that can be done, and note why there are no more."""
        with suppress(Exception):
            self._write(latest=step)
        self._writer.give_up(Gap(reason=reason, step=min([step, *self._steps]), optimizer="optimizer"))

    def close(self) -> None:
        """Write what is left, and complete the files."""
        if self._writer.is_incomplete:
            self._writer.close()
            return
        self._write(latest=None)
        modules = self._model.modules
        self._writer.write_rank(rank_content(self._world_size, model=modules.get("", ""), modules=modules))
        self._writer.close()

    def _write(self, *, latest: int | None) -> None:
        """Write the steps that have ended when one has begun, in their order; None for all."""
        for step in list(self._steps):
            rows = self._steps[step]
            late = HELD if rows[-1][0].phase == "forward" else _LATE
            if latest is not None and step > latest - late:
                return
            del self._steps[step]
            self._next = step + 1
            self._writer.write_step([seen for seen, _ in rows], np.array([summary for _, summary in rows]))
