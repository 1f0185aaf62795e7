"""A side of a lockstep, or a copy of one: stepped, observed only while it is, its steps taken from memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from traindiff.core.settings import record_settings
from traindiff.observe.common.writing import StepWriter, on_disk
from traindiff.observe.torch.perturb import make_replica
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import find_targets
from traindiff.run.lockstep.live_steps import LiveWriter, RunMessage
from traindiff.run.lockstep.settings import LockstepSettings, Settings, effective_settings
from traindiff.run.lockstep.state_parts import StatePart, state_parts
from traindiff.run.lockstep.stepped import Stepped


class LiveSide:
    """A side that is trained and observed.

    Args:
        stepped: What is stepped.
        settings: What is observed.
        record: Further settings of `traindiff.record`.
        replica: How it is perturbed; empty where it is not.

    Attributes:
        stepped: What is stepped.
        targets: What is observed.
        loss: What the latest step gave.
    """

    def __init__(
        self, stepped: Stepped, settings: LockstepSettings, *, record: Mapping[str, Any], replica: str = ""
    ) -> None:
        self.stepped = stepped
        self.loss: Any = None
        self._output = None
        if settings.output is not None and not replica:
            self._output = os.path.join(settings.output, stepped.name)  # noqa: PTH118  it may be any fsspec URL
        chosen = {
            **stepped.record, **record, "observe": settings.observe, "select": settings.select,
            "every": settings.test_every, "replica": replica or None,
        }  # fmt: skip
        checked = record_settings(**chosen)
        self.targets = find_targets(
            stepped.model, stepped.optimizer, select=checked.select, shards=checked.shards,
            operators=checked.operators,
        )  # fmt: skip
        self._writer: LiveWriter | None = None
        self._said: tuple[Any, Any] = (None, None)
        self.recorder = Recorder(
            stepped.name,
            self.targets,
            checked,
            overwrite=False,
            replica=make_replica(checked.replica, self.targets.root, self.targets.names) if checked.replica else None,
            open_writer=self._open_writer,
            before_every_step=settings.resync,
        )
        with self.recorder.stepping():
            pass  # from here on only what happens in such a block

    def step(self, batch: Any) -> None:
        """Train on a batch, and observe that and nothing else."""
        with self.recorder.stepping():
            self.loss = self.stepped.step(batch)

    def settings(self) -> Settings:
        """What it is set to do now."""
        return effective_settings(self.stepped, self.targets)

    def state(self) -> list[StatePart]:
        """What it carries from one step to the next, as this rank holds it."""
        return state_parts(self.targets, self.recorder.followed)

    def message(self) -> RunMessage:
        """What has come since the last message."""
        assert self._writer is not None
        now = (self._writer.run, self._writer.content)
        new = [None if one is said else one for one, said in zip(now, self._said, strict=True)]
        self._said = now
        return RunMessage(run=new[0], content=new[1], steps=self._writer.take())

    @property
    def num_waiting(self) -> int:
        """How many steps have ended since the last message and were observed."""
        assert self._writer is not None
        return self._writer.num_waiting

    @property
    def loss_number(self) -> float:
        """The loss that the latest step gave; NaN where it gave none. Waits for the device that has it."""
        return next(_numbers(self.loss), float("nan"))

    def _open_writer(self, run: Mapping[str, Any], rank: int, world_size: int) -> StepWriter:
        further = None if self._output is None else on_disk(self._output, overwrite=False)(run, rank, world_size)
        self._writer = LiveWriter(run, rank, further)
        return self._writer


def _numbers(loss: Any) -> Iterator[float]:
    if isinstance(loss, Mapping):
        loss = loss.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        loss = loss.detach().float().item()
    if isinstance(loss, (int, float)):
        yield float(loss)


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Have whatever is raised inside say where that was."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise
