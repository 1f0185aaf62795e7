"""A side of a lockstep, or a copy of one: stepped, observed only while it is, its steps taken from memory."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.settings import record_settings
from traindiff.errors import LockstepError
from traindiff.observe.common.writing import StepWriter, on_disk
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.hooks.optimizer_step import IMPLEMENTATION_CHOICES
from traindiff.observe.torch.perturb.making import make_replica
from traindiff.observe.torch.session.record import STANDARD_SETTINGS
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import Targets, find_targets
from traindiff.observe.torch.sharding.deepspeed_optimizer import (
    EngineOptimizer,
    decouples_weight_decay,
    engine_settings,
)
from traindiff.run.lockstep.live_steps import LiveWriter, RunMessage
from traindiff.run.lockstep.settings import LockstepSettings
from traindiff.run.lockstep.stepped import Stepped, follow_settings

Settings = dict[str, dict[str, Any]]
"""Value of each setting by parameter, or by the empty path where it is one of the whole training."""

UNKNOWN = "unknown"

_NO_SETTINGS = frozenset({*IMPLEMENTATION_CHOICES, "initial_lr", "lr_scale", "name", "param_names", "differentiable"})
"""Entries of a parameter group that say how, or for whom, and not what is computed."""

_OF_ENGINE = ("gradient_clipping", "gradient_accumulation_steps", "loss_scale")
_MADE_HERE = {"gradient_clipping": 0.0, "gradient_accumulation_steps": 1, "loss_scale": 1.0}


def _effective_settings(side: Stepped, targets: Targets) -> Settings:
    """What a side is set to do now. Nothing is read from a device but numbers that a schedule keeps there.

    Args:
        side: The side.
        targets: What is observed of it.
    """
    found: Settings = {}
    engine = engine_settings(side.model)
    whole = engine or (_MADE_HERE if side.loss is not None else {})
    for name in _OF_ENGINE:
        found[name] = {"": whole.get(name, UNKNOWN)}
    found["dtype"] = {path: str(one.dtype).removeprefix("torch.") for path, one in targets.parameters.items()}
    for optimizer in targets.optimizers.values():
        opened = isinstance(optimizer, EngineOptimizer)
        inner: Optimizer = optimizer.inner[0] if isinstance(optimizer, EngineOptimizer) else optimizer
        paths = _paths_of_groups(optimizer, targets)
        for number, group in enumerate(inner.param_groups):
            settings = {name: _plain(value) for name, value in group.items() if name not in _NO_SETTINGS}
            if opened and (decoupled := decouples_weight_decay(inner)) is not None:
                settings["decoupled_weight_decay"] = decoupled
            settings["optimizer"] = _optimizer_kind(inner)
            for path in paths[number] if number < len(paths) else ():
                for name, value in settings.items():
                    found.setdefault(name, {})[path] = value
    return found


def _optimizer_kind(optimizer: Optimizer) -> str:
    """Class of an optimizer; AdamW is an Adam that decouples weight decay, which is a setting of its own."""
    name = type(optimizer).__name__
    return {"AdamW": "Adam", "FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam"}.get(name, name)


def _paths_of_groups(optimizer: Optimizer | EngineOptimizer, targets: Targets) -> list[list[str]]:
    if isinstance(optimizer, EngineOptimizer):
        return [list(group) for group in optimizer.groups]
    return [
        [piece.path for parameter in group["params"] for piece in targets.pieces_of(parameter) or ()]
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    return tuple(value) if isinstance(value, list) else value


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
        checked = record_settings(**{**STANDARD_SETTINGS, **chosen})
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
        return _effective_settings(self.stepped, self.targets)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The state of torch's, Python's and, where it is loaded, NumPy's global generators."""

    cpu: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """The state as it is; draws nothing and waits for no device."""
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state() if cuda else None,
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Have the generators go on from here."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class BatchGuard:
    """Gives every side the batch as it came.

    Only the first batch is copied beforehand. Where a side is seen to change tensors of it, each side is given a copy
    of every batch from then on; one that first does so later is told of.
    """

    def __init__(self) -> None:
        self._number = -1
        self._copies = False
        self._batch: Any = None
        self._backup: Any = None
        self._versions: list[tuple[Tensor, int]] = []

    def begin(self, batch: Any) -> None:
        """A batch has come."""
        self._number += 1
        self._batch = batch
        self._versions = [(tensor, _version(tensor)) for _, tensor in tensors(batch, "batch")]
        self._backup = _copied(batch) if self._copies or self._number == 0 else None

    def given(self) -> Any:
        """What the next side is given: the batch itself, or a copy of what came."""
        return _copied(self._backup) if self._copies else self._batch

    def end(self, side: str) -> None:
        """A side has been stepped.

        Raises:
            LockstepError: It has changed the batch in place, of which there is no copy.
        """
        if self._copies or all(_version(tensor) == version for tensor, version in self._versions):
            return
        if self._backup is None:
            raise LockstepError(
                f"The step of the {side} changed a tensor of batch {self._number} in place, which it has not done to "
                "the first one: the next side would be given something else. Have the step work on a copy."
            )
        self._copies = True

    def release(self) -> None:
        """Let go of the batch."""
        self._batch = self._backup = None
        self._versions = []


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copied(batch: Any) -> Any:
    copies = {
        id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for _, tensor in tensors(batch, "")
    }
    return replaced(batch, copies)


def train_all(sides: Sequence[LiveSide], batch: Any, guard: BatchGuard, *, where: str) -> None:
    """The baseline first, and the candidate last. Each begins with the same random state, and all with the same batch.

    Afterwards generators go on from where the baseline has left them.

    Args:
        sides: Baseline, candidate, and copies of the baseline.
        batch: What to train on.
        guard: Keeps the batch as it came.
        where: Which batch, and on which rank, for what an error says.

    Raises:
        LockstepError: A side has changed the batch in place.
    """
    baseline, candidate, *copies = sides
    follow_settings(baseline.stepped, [one.stepped for one in copies])
    guard.begin(batch)
    before = after = RandomState.now()
    for side in (baseline, *copies, candidate):
        if side is not baseline:
            before.restore()
        with noted(f"traindiff.Lockstep: raised in the step of the {side.stepped.name}, in {where}."):
            side.step(guard.given())
        guard.end(side.stepped.name)
        if side is baseline:
            after = RandomState.now()
    after.restore()
    guard.release()
