"""The recording beside the files: what `traindiff compare` reads."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from traindiff.errors import TraindiffWarning
from traindiff.interop.imported import run_content
from traindiff.interop.onnxruntime.importing import SETTINGS, rank_content
from traindiff.kernels.torch_arrays import as_real, dtype_name, shape_of
from traindiff.observation import Observation
from traindiff.recording import RecordingWriter
from traindiff.sessions.environment import describe
from traindiff.shards import Shard
from traindiff.summary import empty

if TYPE_CHECKING:
    from traindiff.compat.onnxruntime.manager import Model

_LATE = 2
"""A step with gradients is written when the one after the next has begun: its backward pass has ended by then."""

HELD = 16
"""Steps without gradients are held so many steps: one backward pass may come after several forward passes."""

Rows = list[tuple[Observation, Any]]


class KeptRecording:
    """A recording of activations alone, which are told one by one.

    Args:
        path: Directory of the recording.
        model: Its modules; knows the sites of outputs when they are told.
        rank: This rank.
        world_size: Number of ranks.
        overwrite: Replace a recording that is there.
    """

    def __init__(self, path: str, model: Model, *, rank: int, world_size: int, overwrite: bool) -> None:
        self._model = model
        self._world_size = world_size
        self._steps: dict[int, Rows] = {}
        self._next = 0
        self._has_warned = False
        about = describe()
        self._writer = RecordingWriter(
            path,
            run=run_content(world_size, settings=SETTINGS, **about),
            rank=rank,
            world_size=world_size,
            overwrite=overwrite,
        )

    def keep(self, tensor: Tensor, summary: np.void, *, name: str, step: int, call: int, phase: str) -> None:
        """Keep the summary of an activation, or of its gradient."""
        self._add(
            summary,
            shape=shape_of(as_real(tensor)),
            dtype=dtype_name(tensor),
            name=name,
            step=step,
            call=call,
            phase=phase,
        )

    def unobserved(self, tensor: Tensor, reason: str, *, name: str, step: int, call: int, phase: str) -> None:
        """Keep why there are no numbers of one."""
        self._add(
            empty(), shape=(), dtype=dtype_name(tensor), name=name, step=step, call=call, phase=phase, unobserved=reason
        )

    def close(self) -> None:
        """Write what is left, and complete the files."""
        self._write(latest=None)
        self._writer.write_rank(rank_content(self._model.modules, world_size=self._world_size))
        self._writer.close()

    def _add(
        self,
        summary: Any,
        *,
        shape: tuple[int, ...],
        dtype: str,
        name: str,
        step: int,
        call: int,
        phase: str,
        unobserved: str = "",
    ) -> None:
        if step < self._next:
            says = (
                f"StatisticsSubscriber: gradients of step {step} came after more than {HELD} further steps. They are "
                "in its files and not in its recording. Run the backward pass before so many forward passes."
            )
            if not self._has_warned:
                warnings.warn(says, TraindiffWarning, stacklevel=2)
            self._has_warned = True
            return
        path, slot = self._model.sites.get(name, (name, "value"))
        rows = self._steps.setdefault(step, [])
        rows.append(
            (
                Observation(
                    step=step, micro_step=0, optimizer="optimizer", phase=phase, stage="", path=path, slot=slot,
                    call=call, order=len(rows), dtype=dtype, shard=Shard.whole(shape), unobserved=unobserved,
                ),
                summary,
            )
        )  # fmt: skip
        self._write(latest=step)

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
