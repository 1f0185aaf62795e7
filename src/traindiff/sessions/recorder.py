"""A recording in progress: the sink of its taps, and what removes them."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.errors import ConfigError, Problem, UnsupportedTensorError
from traindiff.kernels import summarise
from traindiff.kernels.torch_arrays import as_real, dtype_name
from traindiff.observation import Merge, Observation
from traindiff.recording import RecordingWriter
from traindiff.sessions.containment import Containment
from traindiff.sessions.environment import describe
from traindiff.sessions.pending import Pending
from traindiff.sessions.targets import Targets
from traindiff.settings import RecordSettings
from traindiff.shard import Shard
from traindiff.taps.backward_calls import tap_backward_calls
from traindiff.taps.batch_axis import BatchAxis
from traindiff.taps.inspection import tap_inspection
from traindiff.taps.model_state import ModelStateTap
from traindiff.taps.module_outputs import ActivationTap
from traindiff.taps.optimizer_discovery import tap_optimizer_discovery
from traindiff.taps.optimizer_step import OptimizerTap
from traindiff.taps.parameter_gradients import tap_parameter_gradients
from traindiff.taps.progress import Progress
from traindiff.taps.root_forward import tap_root_forward


class Recorder:
    """A recording in progress. Made by `traindiff.record`; ended by `close` or its `with` block.

    Attributes:
        path: Directory that is being written.
        progress: Where the training is; read by the taps.
    """

    def __init__(self, path: str, targets: Targets, settings: RecordSettings, *, overwrite: bool) -> None:
        self.path = path
        self.progress = Progress(optimizer=targets.primary, observing=settings.records(0))
        self._settings = settings
        self._targets = targets
        self._pending = Pending()
        self._containment = Containment(strict=settings.strict, report=self._record_fault)
        self._optimizers: dict[str, OptimizerTap] = {}
        self._writer: RecordingWriter | None = None
        self._attached = ExitStack()
        rank, world_size = _rank_and_world_size()
        if settings.ranks is not None and rank not in settings.ranks:
            return
        self._writer = RecordingWriter(
            path,
            run={"world_size": world_size, "mesh": None, "settings": settings.to_json(), **describe()},
            rank=rank,
            world_size=world_size,
            overwrite=overwrite,
        )
        with ExitStack() as undo:
            undo.callback(self._writer.close)
            self._attach(undo)
            self._write_rank()
            undo.callback(atexit.unregister, close_at_exit(self))
            self._attached = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The step that the training is in, counted from 0."""
        return self.progress.step

    def log(
        self,
        name: str,
        value: float | Tensor,
        *,
        merge: Literal["mean", "sum"] = "mean",
        weight: float | None = None,
    ) -> None:
        """Record a scalar, e.g. a loss or a gradient norm that the training reports.

        Between a step of the optimizer and the next forward pass it belongs to the step that has
        just ended.

        Args:
            name: What it is called in the recording.
            value: A number, or a tensor with one element.
            merge: How the values of several micro-steps, and of several ranks, become one.
            weight: Weight of this value in a mean; the size of the latest batch where left out.

        Raises:
            ConfigError: `merge` is neither word.
        """
        if merge not in ("mean", "sum"):
            where = f"log({name!r}, merge=...)"
            problem = Problem.unknown_name(
                where=where, kind="a way to merge", found=merge, known=("mean", "sum")
            )
            raise ConfigError("log(...)", [problem], consequence="the value was not recorded")
        self._containment.guarded("log", self._log)(name, value, merge, weight)

    def close(self) -> None:
        """Remove every tap and complete the files. Later calls do nothing."""
        attached, self._attached = self._attached, ExitStack()
        self._containment.guarded("writer", self._write)()
        attached.close()
        self._writer = None

    def emit(
        self,
        tensor: Tensor,
        *,
        phase: str,
        path: str,
        slot: str,
        stage: str = "",
        call: int = 0,
        micro_step: int | None = None,
        optimizer: str | None = None,
        shard: Shard | None = None,
        merge: Merge = "shard",
        weight: float = 1.0,
        late: bool = False,
    ) -> None:
        """See `traindiff.taps.sink.Sink`. `late` files it under the step that has just ended."""
        shard = shard or Shard.whole(tuple(tensor.shape))
        if tensor.is_complex():  # a last axis of real and imaginary parts
            shard = Shard(
                shape=(*shard.shape, 2), global_shape=(*shard.global_shape, 2), offset=(*shard.offset, 0)
            )
        reason, summary = "", None
        try:
            summary = summarise(as_real(tensor), shard)
        except UnsupportedTensorError as error:
            reason = str(error)
        progress = self.progress
        name = optimizer or progress.optimizer
        seen = Observation(
            step=progress.steps.get(name, 0) - late,
            micro_step=progress.micro_step if micro_step is None else micro_step,
            optimizer=name, phase=phase, stage=stage, path=path, slot=slot, call=call,
            order=progress.next_order(late=late), dtype=dtype_name(tensor), shard=shard, merge=merge,
            weight=weight, unobserved=reason,
        )  # fmt: skip
        self._pending.append(seen, summary)

    def unobserved(
        self, reason: str, *, phase: str, path: str, slot: str, stage: str = "", optimizer: str | None = None
    ) -> None:
        """See `traindiff.taps.sink.Sink`."""
        progress = self.progress
        name = optimizer or progress.optimizer
        seen = Observation(
            step=progress.steps.get(name, 0), micro_step=progress.micro_step, optimizer=name, phase=phase,
            stage=stage, path=path, slot=slot, call=0, order=progress.next_order(), dtype="",
            shard=Shard.whole(()), unobserved=reason,
        )  # fmt: skip
        self._pending.append(seen, None)

    def guarded(self, tap: str, hook: Callable[..., None]) -> Callable[..., Any]:
        """See `traindiff.taps.sink.Sink`."""
        return self._containment.guarded(tap, hook)

    def _attach(self, undo: ExitStack) -> None:
        targets, observe = self._targets, self._settings.observe
        batch_axis = BatchAxis(self._settings.batch_axis)
        self._model_state = ModelStateTap(
            targets.parameters if self._observes_parameters else {},
            targets.buffers if self._observes_parameters else {},
            self,
        )
        activations = ActivationTap(
            self, batch_axis=batch_axis, forward="forward" in observe, backward="backward" in observe,
            evaluation=self._settings.evaluation,
        )  # fmt: skip
        undo.enter_context(tap_backward_calls(self, observe_loss="loss" in observe))
        if observe & {"forward", "backward"}:
            undo.enter_context(activations.attach(targets.modules))
            undo.enter_context(tap_inspection(self.guarded("inspect", activations.inspect)))
        # After the modules' own hooks: the root's output still belongs to the forward pass that this ends.
        undo.enter_context(
            tap_root_forward(
                targets.root, self, batch_axis=batch_axis, observe_batch="batch" in observe,
                evaluation=self._settings.evaluation, before_step=self._model_state.before_step,
            )
        )  # fmt: skip
        if "grad.micro" in observe:
            undo.enter_context(tap_parameter_gradients(targets.parameters, self))
        for name, optimizer in targets.optimizers.items():
            undo.enter_context(self._track(name, optimizer).attach())
        if not targets.optimizers:
            self._discovered = undo.enter_context(ExitStack())
            undo.enter_context(tap_optimizer_discovery(targets.names, self._discover))

    @property
    def _observes_parameters(self) -> bool:
        return bool(self._settings.observe & {"param", "update"})

    def _track(self, name: str, optimizer: Optimizer) -> OptimizerTap:
        observe = set(self._settings.observe)
        if self._observes_parameters:
            observe.add("param")
        tap = OptimizerTap(
            optimizer, name=name, names=self._targets.names, observe=observe, sink=self, on_end=self._end_step
        )
        self._optimizers[name] = tap
        return tap

    def _discover(self, optimizer: Optimizer) -> None:
        name = f"optimizer[{len(self._optimizers)}]" if self._optimizers else "optimizer"
        tap = self._track(name, optimizer)
        self._discovered.enter_context(tap.attach())
        # The hooks just registered run from the next step on; this step's first half is done here.
        self.guarded("optimizer_step", tap.before_step)()
        self._write_rank()

    def _end_step(self, name: str) -> None:
        primary = name == self.progress.optimizer
        if primary:
            self.guarded("model_state", self._model_state.after_step)()
        self.guarded("writer", self._write)(name)
        following = self.progress.steps.get(name, 0) + 1
        self.progress.end_step(name, observing=self._settings.records(following))

    def _write(self, optimizer: str | None = None) -> None:
        if self._writer is not None:
            for observations, summaries in self._pending.take(optimizer):
                self._writer.write_step(observations, summaries)

    def _write_rank(self) -> None:
        if self._writer is not None:
            optimizers = [
                {"name": name, "type": type(tap.optimizer).__qualname__, "groups": tap.groups()}
                for name, tap in self._optimizers.items()
            ]
            self._writer.write_rank(
                {**self._targets.describe(), "optimizers": optimizers, "pid": os.getpid()}
            )

    def _log(self, name: str, value: float | Tensor, merge: Merge, weight: float | None) -> None:
        progress = self.progress
        late = not progress.forward_done and progress.batch is None and progress.step > 0
        if not self._settings.records(progress.step - late):
            return
        tensor = (
            value
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float64, device="cpu")
        )
        self.emit(
            tensor.detach().reshape(()), phase="loss", path=name, slot="logged", merge=merge, late=late,
            call=progress.next_call(name, "logged"),
            weight=float(progress.samples) if weight is None else float(weight),
        )  # fmt: skip

    def _record_fault(self, tap: str, says: str) -> None:
        self.unobserved(f"the {tap} tap failed: {says}", phase="batch", path="traindiff", slot=tap)


def close_at_exit(recorder: Recorder) -> Callable[[], None]:
    """Close the recorder when the interpreter exits, without keeping it alive until then."""
    reference = weakref.ref(recorder)

    def close() -> None:
        if (still_there := reference()) is not None:
            still_there.close()

    atexit.register(close)
    return close


def _rank_and_world_size() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
