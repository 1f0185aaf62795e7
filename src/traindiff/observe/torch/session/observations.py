"""The sink of a session's taps: guards their hooks, and makes observations with summaries of their tensors."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from traindiff.core.kernels.store import SummaryStore
from traindiff.core.kernels.torch_arrays import (
    address,
    detail_of,
    dtype_name,
    shape_of,
    sparse_parts,
)
from traindiff.core.observation import (
    LOSS_SCALE,
    OPERATOR_STAGES,
    PRODUCT_STAGES,
    SAMPLE,
    Merge,
    Observation,
    is_of_evaluation,
)
from traindiff.core.settings import RecordSettings
from traindiff.core.shards import Region, Shard
from traindiff.core.summary import Detail
from traindiff.core.torch_compat.compiling import exclude_from_compilation, is_dynamo_compiling, is_tracing
from traindiff.core.torch_compat.cuda import is_capturing
from traindiff.core.torch_compat.modes import has_function_modes
from traindiff.core.torch_compat.training import arrived, has_arrived, is_asynchronous, versions_of
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.common.faults import Faults
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.sink import MOST_BYTES, ROW_BYTES, ObservationBuffer, Step
from traindiff.observe.torch.hooks.inert_on_copy import InertOnCopy
from traindiff.observe.torch.hooks.known_tensor import KnownTensor, known_tensor
from traindiff.observe.torch.hooks.out_of_sight import called_out_of_sight, hidden, out_of_sight
from traindiff.observe.torch.hooks.repeated import PLAIN, Plan, Repeated, learned
from traindiff.observe.torch.perturb.replica import NAME as REPLICA
from traindiff.observe.torch.session.teacher_forcing import ForcedValues
from traindiff.observe.torch.sharding.layout import Layout, is_before_unscaling

_REPLICA_FAILED = (
    "traindiff no longer perturbs the training: {message}. The training goes on; the recording says that it is no full "
    "replica, and no floors can be measured from it."
)

GRAPHS = "CUDA graphs"
_CAPTURED = (
    "{message}. The training is not affected, and the recording says what it lacks. To observe these parts, record the "
    "training without CUDA graphs."
)


class _Guard(InertOnCopy):
    """A hook made harmless."""

    __slots__ = ("_alters", "_always", "_containment", "_hook", "_idle", "_quick", "_tap")

    def __init__(
        self,
        containment: Containment,
        tap: str,
        hook: Callable[..., Any],
        *,
        always: bool = False,
        alters: bool = False,
        idle: Callable[[], bool] | None = None,
        quick: Callable[..., bool] | None = None,
    ) -> None:
        self._containment = containment
        self._tap = tap
        self._hook = hook
        self._always = always
        self._alters = alters
        self._idle = idle
        self._quick = quick

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Compiled code is observed by operators; see traindiff.observe.torch.hooks.compiled.
        if is_dynamo_compiling() or (self._idle is not None and self._idle()):
            return None
        containment, tap, always = self._containment, self._tap, self._always
        if not always and (containment.paused or tap in containment.disabled):
            return None
        if self._quick is not None and not has_function_modes():
            try:
                if self._quick(*args):
                    return None
            except Exception as error:  # noqa: BLE001  whatever it is, the training goes on
                return containment.failed(tap, error)
        if hidden.asked_by is containment:  # the hook that calls this one may run, so this one may
            try:
                result = self._hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  whatever it is, the training goes on
                return containment.failed(tap, error)
            return result if self._alters else None
        if is_tracing():
            return None
        if is_capturing() and not always:
            containment.leave_out_graph()
            return None
        result = called_out_of_sight(
            containment.call, tap, self._hook, args, kwargs,
            functions=not self._alters, asked_by=None if always else containment,
        )  # fmt: skip
        return result if self._alters else None


exclude_from_compilation(_Guard.__call__, callees=True)


class Containment(Faults):
    """Runs torch's hooks so that an error in one disables its tap and never reaches the training.

    No mode of the training sees what the hooks compute; see `traindiff.observe.torch.hooks.out_of_sight`. The
    arguments are those of `Faults`.

    Attributes:
        paused: Only hooks that clean up are run, because another training is running beside the observed one.
    """

    def run(self, tap: str, hook: Callable[[], Any], *, always: bool = False) -> Any:
        """`Faults.run`, out of sight of the training."""
        with out_of_sight():
            return super().run(tap, hook, always=always)

    def together(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function that calls guarded hooks: it is asked once for all of them whether they may run.

        Nothing else that it does is guarded.
        """
        if is_tracing() or is_capturing():  # each hook does what it has to do then
            function(*args)
        else:
            called_out_of_sight(self._together, function, args, asked_by=self)

    def _together(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        running = self.running
        outer, running.hook = running.hook, True
        try:
            function(*args)
        finally:
            running.hook = outer

    def guarded(
        self,
        tap: str,
        hook: Callable[..., Any],
        *,
        always: bool = False,
        idle: Callable[[], bool] | None = None,
        quick: Callable[..., bool] | None = None,
    ) -> Callable[..., Any]:
        """`Faults.guarded`; the result returns None, which tells torch to change nothing.

        Args:
            tap: See `Faults.guarded`.
            hook: See there.
            always: See there.
            idle: Tells whether the hook has nothing to do, which is quicker to ask than to guard it. It asks torch
                nothing.
            quick: Does what the hook does if that takes no operator of torch; False, and nothing is done, if not.
        """
        return _Guard(self, tap, hook, always=always, idle=idle, quick=quick)

    def altering(
        self, tap: str, hook: Callable[..., Any], *, quick: Callable[..., bool] | None = None
    ) -> Callable[..., Any]:
        """`hook`, made harmless. Its result replaces what torch gave it, unless the result is None.

        `quick` tells, without an operator of torch, whether that is None; False if it does not know.
        """
        return _Guard(self, tap, hook, alters=True, quick=quick)

    def leave_out_graph(self) -> None:
        """Say once that a CUDA graph is not observed: hooks run when it is captured, and not when it is replayed."""
        self.disable(GRAPHS, "torch replays a CUDA graph without Python, so nothing inside it is observed")

    def template(self, tap: str) -> str:
        """The warning about a tap that failed; a replica's says that the recording is no full replica."""
        if tap == GRAPHS:
            return _CAPTURED
        return _REPLICA_FAILED if tap.startswith(REPLICA) else super().template(tap)


exclude_from_compilation(Containment.together, callees=True)

OVERWRITTEN = "it was written to before anybody waited for the collective that computes it"

_SPARSE_PHASES = frozenset({"batch", "forward", "backward"})
"""Phases in which a sparse tensor is observed by its parts; the gradient of a parameter is made dense before."""

_SUMMARY_ALONE = OPERATOR_STAGES | PRODUCT_STAGES | {SAMPLE}
"""Stages of which only the summary is kept, whatever `detail` says."""


class Observations(ObservationBuffer):
    """The sink of a session's taps; see `traindiff.observe.common.sink.Sink`.

    Args:
        progress: Where the training is.
        layout: How this rank's tensors lie in those of the whole training.
        settings: What is kept of a tensor beyond its summary, and where that is computed.
        containment: Guards hooks.
        on_full: Called when more waits to be written than should.
        forced: Values that replace the observed tensors, if any.
        last_seen: Called with each observation before anything else is done with it, if given.

    Attributes:
        layout: May be replaced as soon as more is known of it.
        last_seen: See above; may be set to None.
        guarded: `Containment.guarded`.
        altering: `Containment.altering`.
    """

    def __init__(
        self,
        *,
        progress: Progress,
        layout: Layout,
        settings: RecordSettings,
        containment: Containment,
        on_full: Callable[[], None],
        forced: ForcedValues | None,
        last_seen: Callable[[Observation], None] | None = None,
    ) -> None:
        super().__init__(progress, on_full)
        self.layout = layout
        self.guarded = containment.guarded
        self.altering = containment.altering
        self.last_seen = last_seen
        self._detail = settings.detail - {"summary"}
        self._bounds = settings.bounds
        self._loss_scale: Tensor | None = None
        self._forced = forced
        self._summaries = SummaryStore(()) if settings.run_on_cpu else SummaryStore()
        # Tensors that a collective is still computing, with counters of the writes to them. To read one now would wait
        # for the collective earlier than the training does, and so overlap less with it.
        self._in_flight: list[tuple[Tensor, Observation, tuple[int, int]]] = []

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
        region: Region | None = None,
        scaled: bool | None = None,
        term: int | None = None,
        late: bool = False,
    ) -> Observation | None:
        """`Sink.emit`; `late` files the tensor under the step that has just ended."""
        if region is None and (
            row := self._straight(
                tensor, phase=phase, path=path, slot=slot, stage=stage, call=call, micro_step=micro_step,
                optimizer=optimizer, shard=shard, merge=merge, weight=weight, scaled=scaled, term=term, late=late,
            )
        ):  # fmt: skip
            return row
        if phase in _SPARSE_PHASES and (parts := sparse_parts(tensor)):
            with self._not_forcing(f"{path} {slot}", "it is sparse"):
                for name, dense in parts:
                    self.emit(
                        dense, phase=phase, path=path, slot=f"{slot}.{name}", stage=stage, call=call,
                        micro_step=micro_step, optimizer=optimizer, late=late,
                        scaled=scaled if name == "values" else False,
                    )  # fmt: skip
            return None
        self._read_arrived()
        if self._bounds and (phase, path) == ("loss", LOSS_SCALE):
            self._loss_scale = tensor
        if scaled is None:
            scaled = self.progress.loss_scaled and is_before_unscaling(phase=phase, stage=stage, slot=slot)
        if region is None and shard is None:
            region = self.layout.region_of_parameter(tensor, path=path, phase=phase)
        shard = shard or Shard.whole(shape_of(tensor) if region is None else region.shape)
        factor = self.layout.factor(phase=phase, stage=stage, path=path, slot=slot)
        for part in self.layout.local_shards(tensor, shard, merge, phase=phase, region=region):
            seen = self._seen(
                optimizer=optimizer, late=late, micro_step=micro_step, phase=phase, stage=stage, path=path, slot=slot,
                call=call, dtype=dtype_name(part.tensor), shard=part.shard, merge=part.merge, weight=weight,
                term=part.term if term is None else term, factor=factor, scaled=scaled,
            )  # fmt: skip
            # Random state is read when a forward pass ends, also where an error ends it.
            if self.last_seen is not None and path != "rng":
                self.last_seen(seen)
            if self._forced is None and is_asynchronous(part.tensor) and not has_arrived(part.tensor):
                self._in_flight.append((part.tensor, seen, versions_of(part.tensor)))
            else:
                self._keep(part.tensor, seen)
        return None

    def known(self, row: Observation | None, tensor: Tensor) -> KnownTensor | None:
        """`Sink.known`."""
        return None if row is None else known_tensor(row, tensor, self.layout, self._summaries)

    def again(self, known: KnownTensor, tensor: Tensor, *, micro_step: int, guarded: bool = True) -> bool:
        """`Sink.again`."""
        if known.layout is not self.layout or self._is_special_now or not known.looks(tensor):
            return False
        if not guarded and (known.write is None or self._bytes + ROW_BYTES > MOST_BYTES):
            return False
        try:
            first = address(tensor)
        except UnsupportedTensorError:  # which the slow way tells
            return False
        progress, row = self.progress, known.row
        step = progress.steps.get(row.optimizer, progress.first_step)
        observations, summaries, _ = self._steps.get((row.optimizer, step)) or self._of_step(row.optimizer, step)
        if known.write is not None:
            place = summaries.place()
            known.write(first, place)
        elif not (place := self._summaries.add_to(summaries, tensor, row.shard)):
            return False
        scaled, evaluation = known.has_scale and progress.loss_scaled, progress.evaluation if known.of_evaluation else 0
        observations.append_again((row, step, micro_step, progress.next_order(), scaled, evaluation, place))
        self._bytes += ROW_BYTES
        if self._bytes > MOST_BYTES:
            self._on_full()
        return True

    @property
    def _goes_straight(self) -> bool:
        """True if a plain tensor is its own part on this rank, and nothing is kept of it but its summary."""
        layout = self.layout
        special = self._detail or self._bounds or layout.parameters or layout.data.alike > 1
        return not (special or self._is_special_now)

    @property
    def _is_special_now(self) -> bool:
        """True if more is done at the moment than to summarize what is observed."""
        return (
            bool(self._in_flight)
            or self._forced is not None
            or self.last_seen is not None
            or "deepspeed" in sys.modules
        )

    def _straight(
        self, tensor: Tensor, *, phase: str, path: str, slot: str, stage: str, call: int, micro_step: int | None,
        optimizer: str | None, shard: Shard | None, merge: Merge, weight: float, scaled: bool | None,
        term: int | None, late: bool,
    ) -> Observation | None:  # fmt: skip
        """Observe a plain tensor the shortest way, with the same outcome as any other; None if there is none."""
        if type(tensor) not in PLAIN or not self._goes_straight:
            return None
        progress, layout = self.progress, self.layout
        shard = shard or Shard.whole(tuple(tensor.shape))
        name = optimizer or progress.optimizer
        step = progress.number_of(name) - late
        observations, summaries, _ = self._of_step(name, step)
        if not (place := self._summaries.add_to(summaries, tensor, shard)):
            return None
        if scaled is None:
            scaled = progress.loss_scaled and is_before_unscaling(phase=phase, stage=stage, slot=slot)
        evaluation = progress.late_evaluation if late else progress.evaluation
        factor = layout.factor(phase=phase, stage=stage, path=path, slot=slot)
        row = Observation(
            step, progress.micro_step if micro_step is None else micro_step, name, phase, stage, path, slot, call,
            progress.next_order(late=late), dtype_name(tensor), shard, merge, weight, factor,
            layout.data.term if term is None else term, scaled, "",
            evaluation if evaluation and is_of_evaluation(phase, stage) else 0,
        )  # fmt: skip
        observations.append(row, place)
        self._bytes += ROW_BYTES
        if self._is_full:
            self._on_full()
        return row

    def repeated(
        self, known: Repeated, tensors: Sequence[Tensor | None] | None, emit: Callable[[], None], *, about: Any = None
    ) -> None:
        """`Sink.repeated`."""
        about = (self.progress.loss_scaled, about)
        plan, known.plan = known.plan, None
        if tensors is None or not self._may_repeat:
            emit()
        elif (
            plan is not None and plan.layout is self.layout
            and (addresses := plan.addresses(tensors, about)) is not None
        ):  # fmt: skip
            known.plan = plan
            self._repeat(plan, tensors, addresses)
        else:
            known.plan = self._learn(tensors, emit, about)

    @property
    def _may_repeat(self) -> bool:
        """False if more is done with an observation than to keep its summary, or if its place may change."""
        return not (self._detail or self._bounds or self._is_special_now or self.progress.is_in_pipeline)

    def _learn(self, tensors: Sequence[Tensor | None], emit: Callable[[], None], about: Any) -> Plan | None:
        """Observe the tensors the slow way; returns what is known of them now."""
        before = {key: (step, len(step[0])) for key, step in self._steps.items()}
        emit()
        grown = []
        for key, step in self._steps.items():
            held, rows = before.get(key, (step, 0))
            if held is not step or len(step[0]) > rows:
                grown.append((step, rows))
        if len(grown) != 1 or self._in_flight:
            return None
        (((observations, _, _), start),) = grown
        seen = observations[start:]
        return learned(tensors, seen, about, progress=self.progress, layout=self.layout, store=self._summaries)

    def _repeat(self, plan: Plan, tensors: Sequence[Tensor | None], addresses: array[int]) -> None:
        """Observe tensors of which everything but their numbers is known."""
        progress = self.progress
        step = progress.number_of(plan.optimizer)
        for part in plan.parts:
            observations, summaries, _ = self._of_step(plan.optimizer, step)
            places = plan.write(part, tensors, addresses, summaries, self._summaries)
            order = progress.next_orders(part.count)
            observations.extend(
                part.columns_in(step=step, micro_step=progress.micro_step, evaluation=progress.evaluation, order=order),
                places,
            )
            self._bytes += ROW_BYTES * part.count
            if self._is_full:
                self._on_full()

    @contextmanager
    def _not_forcing(self, site: str, why: str) -> Iterator[None]:
        """Inside it, observed tensors keep their values."""
        forced, self._forced = self._forced, None
        if forced is not None:
            forced.not_forced.setdefault(site, why)
        try:
            yield
        finally:
            self._forced = forced

    def together(self) -> AbstractContextManager[None]:
        """`Sink.together`."""
        together = self._summaries.together()
        return together if self._forced is None else self._forced.after(together)

    def settle(self) -> None:
        """Summarize what collectives have computed by now; wait for those that nobody has waited for."""
        self._read_arrived(all_of_them=True)

    def take(self, optimizer: str | None = None) -> Iterator[Step]:
        """Remove and yield the observations of one optimizer, or of all: one item per step."""
        self._summaries.end_step()
        return super().take(optimizer)

    def clear(self) -> None:
        """Drop everything."""
        self._in_flight.clear()
        super().clear()

    def _read_arrived(self, *, all_of_them: bool = False) -> None:
        """Summarize tensors that were in flight and have arrived; with `all_of_them` wait for the others, too."""
        if not self._in_flight:
            return
        held, self._in_flight = self._in_flight, []
        for tensor, seen, versions in held:
            if versions_of(tensor) != versions:
                self._append(seen._replace(unobserved=OVERWRITTEN), None)
            elif all_of_them or has_arrived(tensor):
                self._keep(arrived(tensor), seen)
            else:
                self._in_flight.append((tensor, seen, versions))

    def _keep(self, tensor: Tensor, seen: Observation) -> None:
        """Summarize a tensor and keep its observation."""
        if is_asynchronous(tensor):
            tensor = arrived(tensor)
        if tensor.is_complex():  # a last axis of real and imaginary parts
            shard = seen.shard
            shard = Shard(shape=(*shard.shape, 2), global_shape=(*shard.global_shape, 2), offset=(*shard.offset, 0))
            seen = seen._replace(shard=shard)
        summary = None
        try:
            summary = self._summaries.add(tensor, seen.shard)
        except UnsupportedTensorError as error:
            seen = seen._replace(unobserved=str(error))
        self._append(seen, summary, self._detail_of(tensor, seen, summary) if self._detail or self._bounds else None)
        if self._forced is not None:
            self._forced.overwrite(tensor, seen)
        if self._is_full:
            self._on_full()

    def _detail_of(self, tensor: Tensor, seen: Observation, summary: Any) -> Detail | None:
        if seen.path == "rng" or seen.stage in _SUMMARY_ALONE or summary is None:
            return None
        return detail_of(tensor, self._detail, bounds=self._bounds_of(seen), summary=summary)

    def _bounds_of(self, seen: Observation) -> Sequence[float]:
        """The bounds, multiplied by the factors that the engine and the loss scale have put into the gradient."""
        if not self._bounds or (seen.phase, seen.slot) != ("grad", "grad"):
            return ()
        scale = float(self._loss_scale) if seen.scaled and self._loss_scale is not None else 1.0
        factor = seen.factor * scale
        return self._bounds if factor == 1.0 else [bound * factor for bound in self._bounds]
