"""All taps of a session, attached to one training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.engines.deepspeed_optimizer import EngineOptimizer
from traindiff.engines.deepspeed_step import EngineOptimizerTap
from traindiff.engines.layout import Layout
from traindiff.errors import TraindiffWarning
from traindiff.replicas.compiled import notice_compiled
from traindiff.replicas.replica import Replica
from traindiff.sessions.targets import Targets
from traindiff.settings import RecordSettings
from traindiff.shards import Piece
from traindiff.site import matches
from traindiff.taps.backward_calls import tap_backward_calls
from traindiff.taps.batch_axis import BatchAxis
from traindiff.taps.compiled import trace_hooks
from traindiff.taps.gradient_stages import GradientStagesTap
from traindiff.taps.inner_optimizer import inner_optimizer
from traindiff.taps.loss_scale import tap_loss_scale
from traindiff.taps.model_state import ModelStateTap
from traindiff.taps.module_outputs import ActivationTap
from traindiff.taps.optimizer_discovery import tap_optimizer_discovery
from traindiff.taps.optimizer_replay import OptimizerReplayTap
from traindiff.taps.optimizer_step import OptimizerTap
from traindiff.taps.parameter_gradients import tap_gathered_gradients, tap_parameter_gradients
from traindiff.taps.pipeline_calls import tap_pipeline_calls
from traindiff.taps.root_forward import RootForwardTap
from traindiff.taps.samples import SamplesTap
from traindiff.taps.sink import Sink

_LISTED = "traindiff show RECORDING lists the sites that there are."


class Attachment:
    """The taps that the settings ask for, from construction until `close`.

    Args:
        targets: What is observed.
        settings: Which phases of it, and how.
        sink: Receives the observations.
        replica: Perturbs the training, where that is wanted.
        before_every_step: Whether parameters are recorded before each step, not only where the step
            before was not recorded.
        on_step: Called with an optimizer's name when a step of it has ended and was observed.
        on_discovery: Called when an optimizer was found that was not given.
        on_schedule: Called with the root, a pipeline's schedule, and its stages on this rank, before it runs a batch.
    """

    def __init__(
        self,
        targets: Targets,
        settings: RecordSettings,
        sink: Sink,
        *,
        replica: Replica | None,
        before_every_step: bool,
        on_step: Callable[[str], None],
        on_discovery: Callable[[], None],
        on_schedule: Callable[[nn.Module, Any, list[Any]], None],
    ) -> None:
        self._targets = targets
        self._select = settings.select
        self._sink = sink
        self._on_step = on_step
        self._on_discovery = on_discovery
        self._on_schedule = on_schedule
        self._optimizers: dict[str, OptimizerTap] = {}
        self._report_silence: Callable[[], None] = lambda: None
        self._observe = settings.observe
        if settings.observe & {"param", "update"}:
            self._observe |= {"param"}
        observes_parameters = "param" in self._observe
        self._model_state = ModelStateTap(
            targets.parameters if observes_parameters else {},
            targets.pieces_of,
            targets.buffers if observes_parameters else {},
            targets.root,
            sink,
            before_every_step=before_every_step,
        )
        with ExitStack() as undo:
            if replica:  # before the taps, which see what it did
                undo.enter_context(replica.attach(sink))
                undo.enter_context(notice_compiled(targets.root, sink))
            self._attach(undo, settings)
            undo.enter_context(trace_hooks())
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Remove all taps."""
        self._undo.close()

    def finish(self) -> None:
        """Record what can be told only at the end; call it before the last observations are written."""
        self.settle()
        self._report_silence()
        self._report_unused()

    def settle(self) -> None:
        """End the steps of optimizers that ran in compiled code, which has returned by now."""
        for tap in self._optimizers.values():
            tap.settle()

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes of what is observed, for `rank.json`."""
        optimizers = [
            {"name": name, "type": type(tap.optimizer).__qualname__, "groups": tap.groups()}
            for name, tap in self._optimizers.items()
        ]
        return {**self._targets.describe(), "optimizers": optimizers}

    def _attach(self, undo: ExitStack, settings: RecordSettings) -> None:
        targets, observe, sink = self._targets, self._observe, self._sink
        batch_axis = BatchAxis(settings.batch_axis, targets.modules)
        self._report_unused = sink.guarded("batch_axis", partial(_report_unused, batch_axis, targets.layout))
        activations = ActivationTap(
            sink, batch_axis=batch_axis, forward="forward" in observe, backward="backward" in observe,
            evaluation=settings.evaluation, places=targets.layout.places_of,
        )  # fmt: skip
        undo.enter_context(
            tap_pipeline_calls(
                sink,
                targets.root.modules(),
                observe_loss="loss" in observe,
                on_schedule=partial(self._on_schedule, targets.root),
            )
        )
        undo.enter_context(tap_backward_calls(sink, targets.names, observe_loss="loss" in observe))
        if observe & {"loss", "backward", "grad"}:
            undo.enter_context(tap_loss_scale(sink, targets.names))
        if observe & {"forward", "backward"}:
            self._report_silence = sink.guarded("module_outputs", activations.report_silence)
            undo.enter_context(activations.attach(targets.modules))
            undo.enter_context(activations.attach_inspection())
        # After the modules' own hooks: the root's output still belongs to the forward pass that this ends.
        root_forward = RootForwardTap(
            targets.roots, sink, batch_axis=batch_axis, observe_batch="batch" in observe,
            evaluation=settings.evaluation, places=targets.layout.places_of,
            before_forward=self.settle,
            before_step=sink.guarded("model_state", self._model_state.before_step),
        )  # fmt: skip
        undo.enter_context(root_forward.attach())
        if "samples" in observe:
            undo.enter_context(SamplesTap(targets.roots, sink, batch_axis=batch_axis).attach())
        if "grad.micro" in observe:
            undo.enter_context(tap_parameter_gradients(targets.leaves, targets.pieces_of, self._selects, sink))
            undo.enter_context(tap_gathered_gradients(targets.gathering, targets.first_name, self._selects, sink))
        if "grad" in observe:
            stages = GradientStagesTap(
                self._optimizers, holds=lambda tensor: id(tensor) in targets.names, sink=sink,
                observe_gradients="grad.stages" in observe,
            )  # fmt: skip
            undo.enter_context(stages.attach())
        for name, optimizer in targets.optimizers.items():
            undo.enter_context(self._track(name, optimizer))
        if not targets.optimizers:
            self._discovered = undo.enter_context(ExitStack())
            found = sink.guarded("optimizer_discovery", self._discover)
            undo.enter_context(tap_optimizer_discovery(targets.names, found))

    def _track(self, name: str, optimizer: Optimizer | EngineOptimizer) -> ExitStack:
        if isinstance(optimizer, EngineOptimizer):
            engine_tap = EngineOptimizerTap(
                optimizer, name=name, selects=self._selects, observe=self._observe, sink=self._sink,
                on_end=self._end_step,
            )  # fmt: skip
            self._optimizers[name] = engine_tap
            attach = engine_tap.attach
            for one in engine_tap.replays() if "replay" in self._observe else ():
                attach = partial(one.attach, around=attach)
            return attach()
        tap = OptimizerTap(
            optimizer, name=name, pieces_of=self._targets.pieces_of, selects=self._selects, observe=self._observe,
            sink=self._sink, on_end=self._end_step,
        )  # fmt: skip
        self._optimizers[name] = tap
        if "replay" not in self._observe:
            return tap.attach()
        replay = OptimizerReplayTap(
            inner_optimizer(optimizer),
            name=name,
            held=partial(self._updated, tap),
            selects=self._selects,
            sink=self._sink,
        )
        return replay.attach(around=tap.attach)

    def _updated(self, tap: OptimizerTap) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        for number, parameter, pieces in tap.updated():
            yield number, parameter, self._targets.layout.ranges_of(parameter, pieces)

    def _selects(self, path: str) -> bool:
        if path in self._targets.paths:
            return path in self._targets.parameters
        return any(matches(glob, path) for glob in self._select)  # an optimizer may hold more than the model

    def _discover(self, optimizer: Optimizer) -> None:
        name = f"optimizer[{len(self._optimizers)}]" if self._optimizers else "optimizer"
        self._discovered.enter_context(self._track(name, optimizer))
        self._on_discovery()

    def _end_step(self, name: str) -> None:
        if name == self._sink.progress.optimizer:
            self._sink.guarded("model_state", self._model_state.after_step)()
            self._report_silence()
        self._on_step(name)


def _report_unused(batch_axis: BatchAxis, layout: Layout) -> None:
    if patterns := batch_axis.unused:
        says = (
            f"record(batch_axis=...): nothing that was observed matches {' or '.join(map(repr, patterns))}. {_LISTED}"
        )
        warnings.warn(says, TraindiffWarning, stacklevel=2)
    for says in layout.declarations.unused:
        warnings.warn(f"record(shards=...): {says} {_LISTED}", TraindiffWarning, stacklevel=2)
