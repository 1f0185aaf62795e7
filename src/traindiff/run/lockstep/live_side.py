"""The sides of a lockstep, trained on each batch one after the other, each as if it were alone."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.settings import record_settings
from traindiff.core.torch_compat.autograd import version_of
from traindiff.errors import LockstepError
from traindiff.observe.common.writing import StepWriter, on_disk
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.hooks.optimizer_step import IMPLEMENTATION_CHOICES
from traindiff.observe.torch.perturb import make_replica
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import Targets, find_targets
from traindiff.observe.torch.sharding.deepspeed_optimizer import (
    EngineOptimizer,
    decouples_weight_decay,
    engine_settings,
)
from traindiff.run.config.training import Training, logged
from traindiff.run.lockstep.live_steps import LiveWriter, RunMessage
from traindiff.run.lockstep.settings import LockstepSettings
from traindiff.run.lockstep.stepped import follow_settings

Settings = dict[str, dict[str, Any]]
"""Value of each setting by parameter, or by the empty path where it is one of the whole training."""

UNKNOWN = "unknown"

_NO_SETTINGS = frozenset({*IMPLEMENTATION_CHOICES, "initial_lr", "lr_scale", "name", "param_names", "differentiable"})
"""Entries of a parameter group that say how, or for whom, and not what is computed."""

_OF_ENGINE = ("gradient_clipping", "gradient_accumulation_steps", "loss_scale")
_MADE_HERE = {"gradient_clipping": 0.0, "gradient_accumulation_steps": 1, "loss_scale": 1.0}


def _effective_settings(side: Training, targets: Targets) -> Settings:
    """The settings of a side now. Reads nothing from a device except numbers that a schedule keeps there."""
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
    """Class of an optimizer. AdamW counts as an Adam: decoupling weight decay is a setting of its own."""
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


def _last_step(training: Training, total: int | None) -> int | None:
    """Number of the step that ends in the last batch; None if the number of batches is unknown."""
    batches_per_step = (engine_settings(training.model) or {}).get("gradient_accumulation_steps", 1)
    return None if total is None else max(0, total // batches_per_step - 1)


class LiveSide:
    """A side that is trained, and observed only while it is trained; a copy of the baseline if `replica` is not empty.

    Attributes:
        name: `baseline`, `candidate`, or how a copy was made.
        training: The trained model and its step.
        targets: The observed objects.
        loss: The latest result of the step.
    """

    def __init__(
        self,
        training: Training,
        settings: LockstepSettings,
        *,
        name: str,
        record: Mapping[str, Any],
        total: int | None,
        replica: str = "",
    ) -> None:
        self.name = name
        self.training = training
        self.loss: Any = None
        self._output = None
        if settings.output is not None and not replica:
            self._output = os.path.join(settings.output, name)  # noqa: PTH118  it may be any fsspec URL
        chosen = {
            **training.record, **record, "observe": settings.observe, "select": settings.select,
            "every": settings.test_every, "replica": replica or None,
        }  # fmt: skip
        checked = replace(record_settings(**chosen), last=_last_step(training, total))
        self.targets = find_targets(
            training.model, training.optimizer, select=checked.select, shards=checked.shards,
            operators=checked.operators,
        )  # fmt: skip
        self._writer: LiveWriter | None = None
        self._said: tuple[Any, Any] = (None, None)
        self.recorder = Recorder(
            name, self.targets, checked, overwrite=False,
            replica=make_replica(checked.replica, self.targets.root, self.targets.names) if checked.replica else None,
            open_writer=self._open_writer, before_every_step=settings.resync,
        )  # fmt: skip
        with self.recorder.stepping():
            pass  # from here on, only such blocks are observed

    def step(self, batch: Any) -> None:
        """Train on a batch, and observe nothing else."""
        with self.recorder.stepping():
            self.loss = self.training.train_on(batch)

    def settings(self) -> Settings:
        """The side's settings now."""
        return _effective_settings(self.training, self.targets)

    def message(self) -> RunMessage:
        """Everything since the last message."""
        assert self._writer is not None
        now = (self._writer.run, self._writer.content)
        new = [None if one is said else one for one, said in zip(now, self._said, strict=True)]
        self._said = now
        return RunMessage(run=new[0], content=new[1], steps=self._writer.take())

    @property
    def num_waiting(self) -> int:
        """Number of observed steps since the last message."""
        assert self._writer is not None
        return self._writer.num_waiting

    @property
    def loss_number(self) -> float:
        """The loss of the latest step; NaN if it gave none. Waits for the loss's device."""
        loss = dict(logged(self.loss)).get("loss", math.nan)
        return float(loss.detach() if isinstance(loss, Tensor) else loss)

    def _open_writer(self, run: Mapping[str, Any], rank: int, world_size: int) -> StepWriter:
        further = None if self._output is None else on_disk(self._output, overwrite=False)(run, rank, world_size)
        self._writer = LiveWriter(run, rank, further)
        return self._writer


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to any exception raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def random_state() -> Callable[[], None]:
    """A function that makes the global generators of torch, Python and, if it is loaded, NumPy continue from here.

    Draws nothing and waits for no device.
    """
    numpy = sys.modules.get("numpy")
    restoring = [partial(torch.set_rng_state, torch.get_rng_state()), partial(random.setstate, random.getstate())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        restoring.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    if numpy is not None:
        restoring.append(partial(numpy.random.set_state, numpy.random.get_state()))

    def restore() -> None:
        for one in restoring:
            one()

    return restore


class BatchGuard:
    """Gives every side the batch as it came.

    Only the first batch is copied beforehand. If a side changes its tensors, each side gets a copy of every batch from
    then on. A side that changes a later batch first raises an error.
    """

    def __init__(self) -> None:
        self._number = -1
        self._copies = False
        self._batch: Any = None
        self._backup: Any = None
        self._versions: list[tuple[Tensor, int]] = []

    def begin(self, batch: Any) -> None:
        """Remember a new batch."""
        self._number += 1
        self._batch = batch
        self._versions = [(tensor, version_of(tensor)) for _, tensor in tensors(batch, "batch")]
        self._backup = _copied(batch) if self._copies or self._number == 0 else None

    def given(self) -> Any:
        """The batch for the next side: the batch itself, or a copy."""
        return _copied(self._backup) if self._copies else self._batch

    def end(self, side: str) -> None:
        """Check the batch after a side has trained on it.

        Raises:
            LockstepError: The side has changed the batch in place, and there is no copy.
        """
        if self._copies or all(version_of(tensor) == version for tensor, version in self._versions):
            return
        if self._backup is None:
            raise LockstepError(
                f"The step of the {side} changed a tensor of batch {self._number} in place, which it has not done to "
                "the first one: the next side would be given something else. Have the step work on a copy."
            )
        self._copies = True

    def release(self) -> None:
        """Forget the batch."""
        self._batch = self._backup = None
        self._versions = []


def _copied(batch: Any) -> Any:
    copies = {
        id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for _, tensor in tensors(batch, "")
    }
    return replaced(batch, copies)


def train_all(sides: Sequence[LiveSide], batch: Any, guard: BatchGuard, *, where: str) -> None:
    """Train the baseline first and the candidate last, each from the same random state and on the same batch.

    Afterwards the generators continue from the baseline's state. `where` names batch and rank in errors.

    Raises:
        LockstepError: A side has changed the batch in place.
    """
    baseline, candidate, *copies = sides
    follow_settings(baseline.training, [one.training for one in copies])
    guard.begin(batch)
    restore_before = restore_after = random_state()
    for side in (baseline, *copies, candidate):
        if side is not baseline:
            restore_before()
        with noted(f"traindiff.Lockstep: raised in the step of the {side.name}, in {where}."):
            side.step(guard.given())
        guard.end(side.name)
        if side is baseline:
            restore_after = random_state()
    restore_after()
    guard.release()
