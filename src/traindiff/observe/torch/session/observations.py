"""From what taps hand over to what is written: each tensor becomes observations, each with its summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from traindiff.core._torch_compat import arrived, has_arrived, is_asynchronous, is_tracing, run_as_it_is, versions_of
from traindiff.core.kernels.store import SummaryStore
from traindiff.core.kernels.torch_arrays import detail_of, dtype_name, shape_of
from traindiff.core.observation import LOSS_SCALE, OPERATOR_STAGES, SAMPLE, Merge, Observation
from traindiff.core.shards import Region, Shard
from traindiff.core.summary import Detail
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.common.faults import Faults
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.sink import Pending
from traindiff.observe.torch.hooks.left_behind import LeftBehind
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight
from traindiff.observe.torch.perturb.replica import NAME as REPLICA
from traindiff.observe.torch.session.teacher_forcing import ForcedValues
from traindiff.observe.torch.sharding.layout import Layout, is_before_unscaling

_REPLICA_FAILED = (
    "traindiff no longer perturbs the training: {message}. The training goes on; the recording says that it is no full "
    "replica, and no floors can be measured from it."
)


class _Guard(LeftBehind):
    """A hook made harmless."""

    def __init__(
        self, containment: Containment, tap: str, hook: Callable[..., Any], *, always: bool, alters: bool = False
    ) -> None:
        self._containment = containment
        self._tap = tap
        self._hook = hook
        self._always = always
        self._alters = alters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_tracing():
            return None  # compiled code is observed by operators; see traindiff.observe.torch.hooks.compiled
        hook = partial(self._hook, *args, **kwargs)
        result = self._containment.run(self._tap, hook, always=self._always, alters=self._alters)
        return result if self._alters else None


run_as_it_is(_Guard.__call__, callees=True)


class Containment(Faults):
    """Runs torch's hooks so that an error in one disables the tap it belongs to and goes no further.

    No mode of the training sees what they compute; see `traindiff.observe.torch.hooks.out_of_sight`. Args are those of
    `Faults`.

    Attributes:
        paused: No hook is run but those that clean up: another training is running, beside the one that is observed.
    """

    def run(self, tap: str, hook: Callable[[], Any], *, always: bool = False, alters: bool = False) -> Any:
        """See `Faults.run`. `alters` says that the training goes on with what `hook` returns."""
        with out_of_sight(functions=not alters):
            return super().run(tap, hook, always=always)

    def guarded(self, tap: str, hook: Callable[..., None], *, always: bool = False) -> Callable[..., Any]:
        """`hook`, made harmless. It returns None, which tells torch to change nothing.

        Args:
            tap: What an error disables.
            hook: Observes something, or cleans up.
            always: Run it even after the tap was disabled, because it cleans up.
        """
        return _Guard(self, tap, hook, always=always)

    def altering(self, tap: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """`hook`, made harmless; torch uses what it returns in place of what it was given, unless that is None."""
        return _Guard(self, tap, hook, always=False, alters=True)

    def template(self, tap: str) -> str:
        """See `Faults.template`."""
        return _REPLICA_FAILED if tap.startswith(REPLICA) else super().template(tap)


OVERWRITTEN = "it was written to before anybody waited for the collective that computes it"


class InFlight:
    """Holds observed tensors that a collective is still computing.

    To read them would be to wait for them earlier than the training does, and to overlap less than it would.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Observation, tuple[int, int]]] = []

    def holds(self, tensor: Tensor, seen: Observation) -> bool:
        """Keep the tensor for later if it has not arrived."""
        if not is_asynchronous(tensor) or has_arrived(tensor):
            return False
        self._held.append((tensor, seen, versions_of(tensor)))
        return True

    def arrived(self, *, all_of_them: bool = False) -> Iterator[tuple[Tensor, Observation, str]]:
        """Remove and yield those that can be read, each with the reason if it can no more.

        Args:
            all_of_them: Wait for the others: nobody has in this step, e.g. as nobody used them.
        """
        if not self._held:
            return
        held, self._held = self._held, []
        for index, (tensor, seen, versions) in enumerate(held):
            if versions_of(tensor) != versions:
                yield tensor, seen, OVERWRITTEN
            elif all_of_them or has_arrived(tensor):
                yield arrived(tensor), seen, ""
            else:
                self._held.append(held[index])

    def clear(self) -> None:
        """Drop everything."""
        self._held.clear()


_SUMMARY_ALONE = OPERATOR_STAGES | {SAMPLE}
"""Stages of which nothing but a summary is kept, whatever the detail."""


class Observations:
    """The sink of a session's taps; see `traindiff.observe.common.sink.Sink` for what they call.

    Args:
        progress: Where the training is.
        layout: What of which tensors this rank observes.
        detail: What is kept of a tensor beyond its summary.
        bounds: Of the intervals in which elements of gradients of parameters are counted.
        containment: Guards hooks.
        on_full: Called when more waits to be written than should.
        forced: What is put in place of what was observed, if anything.
        last_seen: Called with each observation before anything is done with it, if anything is.
        run_on_cpu: Summarize what is on another device on the CPU.

    Attributes:
        layout: May be replaced as soon as more is known of it.
        last_seen: See above; may be taken away.
    """

    def __init__(
        self,
        *,
        progress: Progress,
        layout: Layout,
        detail: frozenset[str],
        bounds: Sequence[float],
        containment: Containment,
        on_full: Callable[[], None],
        forced: ForcedValues | None,
        last_seen: Callable[[Observation], None] | None = None,
        run_on_cpu: bool = False,
    ) -> None:
        self.progress = progress
        self.layout = layout
        self._detail = detail
        self._bounds = bounds
        self._loss_scale: Tensor | None = None
        self._containment = containment
        self._on_full = on_full
        self._forced = forced
        self.last_seen = last_seen
        self._summaries = SummaryStore(()) if run_on_cpu else SummaryStore()
        self._in_flight = InFlight()
        self._pending = Pending()

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
        late: bool = False,
    ) -> None:
        """See `traindiff.observe.common.sink.Sink`. `late` files it under the step that has just ended."""
        self._read_arrived()
        progress = self.progress
        name = optimizer or progress.optimizer
        if self._bounds and (phase, path) == ("loss", LOSS_SCALE):
            self._loss_scale = tensor
        if scaled is None:
            scaled = progress.loss_scaled and is_before_unscaling(phase=phase, stage=stage, slot=slot)
        if region is None and shard is None:
            region = self.layout.region_of_parameter(tensor, path=path, phase=phase)
        shard = shard or Shard.whole(shape_of(tensor) if region is None else region.shape)
        for part in self.layout.local_shards(tensor, shard, merge, phase=phase, region=region):
            seen = Observation(
                step=progress.steps.get(name, 0) - late,
                micro_step=progress.micro_step if micro_step is None else micro_step,
                optimizer=name, phase=phase, stage=stage, path=path, slot=slot, call=call,
                order=progress.next_order(late=late), dtype=dtype_name(part.tensor), shard=part.shard,
                merge=part.merge, weight=weight, term=part.term,
                factor=self.layout.factor(phase=phase, stage=stage, slot=slot), scaled=scaled,
            )  # fmt: skip
            if (
                self.last_seen is not None and path != "rng"
            ):  # that is looked at when a forward pass ends, also by an error
                self.last_seen(seen)
            if self._forced is not None or not self._in_flight.holds(part.tensor, seen):
                self._keep(part.tensor, seen)

    def unobserved(
        self, reason: str, *, phase: str, path: str, slot: str, stage: str = "", optimizer: str | None = None,
        call: int = 0, late: bool = False,
    ) -> None:  # fmt: skip
        """See `traindiff.observe.common.sink.Sink`. `late` files it under the step that has just ended."""
        progress = self.progress
        name = optimizer or progress.optimizer
        seen = Observation(
            step=progress.steps.get(name, 0) - late, micro_step=progress.micro_step, optimizer=name, phase=phase,
            stage=stage, path=path, slot=slot, call=call, order=progress.next_order(late=late), dtype="",
            shard=Shard.whole(()), unobserved=reason,
        )  # fmt: skip
        self._pending.append(seen, None)

    def together(self) -> AbstractContextManager[None]:
        """See `traindiff.observe.common.sink.Sink`."""
        together = self._summaries.together()
        return together if self._forced is None else self._forced.after(together)

    def guarded(self, tap: str, hook: Callable[..., None]) -> Callable[..., Any]:
        """See `traindiff.observe.common.sink.Sink`."""
        return self._containment.guarded(tap, hook)

    def altering(self, tap: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """See `traindiff.observe.common.sink.Sink`."""
        return self._containment.altering(tap, hook)

    def settle(self) -> None:
        """Summarize what collectives have computed by now; waits for those that nobody has waited for."""
        self._read_arrived(all_of_them=True)

    def take(self, optimizer: str | None = None) -> Iterator[tuple[list[Observation], list[Any], Mapping[int, Detail]]]:
        """Remove and yield what belongs to one optimizer, or to all of them: one item per step; see `Pending.take`."""
        self._summaries.end_step()
        return self._pending.take(optimizer)

    def clear(self) -> None:
        """Drop everything."""
        self._in_flight.clear()
        self._pending.clear()

    def _read_arrived(self, *, all_of_them: bool = False) -> None:
        for tensor, seen, reason in self._in_flight.arrived(all_of_them=all_of_them):
            if reason:
                self._pending.append(replace(seen, unobserved=reason), None)
            else:
                self._keep(tensor, seen)

    def _keep(self, tensor: Tensor, seen: Observation) -> None:
        """Summarize what was seen."""
        if is_asynchronous(tensor):
            tensor = arrived(tensor)
        if tensor.is_complex():  # a last axis of real and imaginary parts
            shard = seen.shard
            shard = Shard(shape=(*shard.shape, 2), global_shape=(*shard.global_shape, 2), offset=(*shard.offset, 0))
            seen = replace(seen, shard=shard)
        summary = None
        try:
            summary = self._summaries.add(tensor, seen.shard)
        except UnsupportedTensorError as error:
            seen = replace(seen, unobserved=str(error))
        kept = seen.path != "rng" and seen.stage not in _SUMMARY_ALONE and summary is not None
        detail = detail_of(tensor, self._detail, bounds=self._bounds_of(seen), summary=summary) if kept else None
        self._pending.append(seen, summary, detail)
        if self._forced is not None:
            self._forced.overwrite(tensor, seen)
        if self._pending.full:
            self._on_full()

    def _bounds_of(self, seen: Observation) -> Sequence[float]:
        """Bounds for the elements as they are: multiplied by what the engine and a loss scale multiply them by."""
        if not self._bounds or (seen.phase, seen.slot) != ("grad", "grad"):
            return ()
        scale = float(self._loss_scale) if seen.scaled and self._loss_scale is not None else 1.0
        factor = seen.factor * scale
        return self._bounds if factor == 1.0 else [bound * factor for bound in self._bounds]
