"""A watch in progress: its hooks, what they see, and what is done about it."""

from __future__ import annotations

import atexit
import logging
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from traindiff.core.made_inside import made_inside
from traindiff.core.settings import RecordSettings
from traindiff.core.site import ROOT
from traindiff.errors import ConfigError, NonFiniteError, Problem, StoppedError, TraindiffWarning
from traindiff.observe.common.circumstances import close_at_exit
from traindiff.observe.common.progress import Progress
from traindiff.observe.torch.hooks import swapped_tensors
from traindiff.observe.torch.hooks.loss_scale import tap_loss_scaler
from traindiff.observe.torch.hooks.out_of_sight import in_sight, out_of_sight
from traindiff.observe.torch.nonfinite.context import WatchContext
from traindiff.observe.torch.nonfinite.early_warnings import EarlyWarnings
from traindiff.observe.torch.nonfinite.frames import Journal
from traindiff.observe.torch.nonfinite.judging import Judging, Moment
from traindiff.observe.torch.nonfinite.module_calls import ModuleCalls
from traindiff.observe.torch.nonfinite.module_gradients import TAP as CALLS
from traindiff.observe.torch.nonfinite.origin import Found, Origin
from traindiff.observe.torch.nonfinite.reading import Reader
from traindiff.observe.torch.nonfinite.saved_call import save
from traindiff.observe.torch.nonfinite.settings import WatchSettings
from traindiff.observe.torch.nonfinite.step_parts import StepParts
from traindiff.observe.torch.session.attachment import Attachment
from traindiff.observe.torch.session.environment import rank_and_world_size
from traindiff.observe.torch.session.observations import Containment
from traindiff.observe.torch.session.targets import Targets

_NO_CALLS = (
    "watch(...): the optimizer stepped in step {step}, but no module of the model was seen to be called in it: "
    "the watch was taken off the modules, or the training calls another one than was given. Gradients and parameters "
    "are still watched. Give watch() the module that the training calls, after all else that changes its modules."
)

_UNHOOKED = (
    "watch(...): in step {step} the hooks of {modules} are gone: something else has removed them. What is given to "
    "these modules, and what they return, is no longer watched. Begin the watch after whatever removes hooks."
)


_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that are watched now: one watch is enough for each."""

_logger = logging.getLogger("traindiff")

_FAILED = (
    "A part of watch(...) ({tap}) failed and watches nothing more: {message}. The training is not affected. What it "
    "has watched until now was finite; nothing is known of what it would watch from here on."
)


@made_inside
class Watcher:
    """A training that is watched. Made by `traindiff.watch`; ended by `close` or its `with` block.

    Args:
        targets: What is watched.
        settings: How.
        observed: What taps of a recording see of it.
        reader: Reads tensors; where left out, those on a CPU when they are seen.

    Attributes:
        origins: What was found so far.
    """

    def __init__(
        self, targets: Targets, settings: WatchSettings, observed: RecordSettings, *, reader: Reader | None = None
    ) -> None:
        if any(root in _watched for root in targets.roots):
            problem = Problem(
                where="watch(model=...)",
                what="is watched already.",
                fix="Close the first watch, or use that one: it watches everything.",
            )
            raise ConfigError("watch(...)", [problem], consequence="nothing was attached to the model")
        self.origins: list[Origin] = []
        self._settings = settings
        self._is_quiet = False
        self._has_warned = False
        self._is_mute = False
        rank, world_size = rank_and_world_size()
        self._rank = rank if world_size > 1 else None
        self._progress = progress = Progress(optimizer=targets.primary)
        self._raised: Exception | None = None  # by the user's function
        containment = Containment(strict=False, report=lambda *_: None, passes=self._is_meant, failed=_FAILED)
        self._journal = Journal(size=settings.frames, traced=settings.trace, write=self._print)
        self._context = context = WatchContext(
            progress=progress, containment=containment, reader=reader or Reader(),
            judging=Judging(journal=self._journal, progress=progress, on_found=self._detect),
            masks=settings.masks, nonfinite=settings.nonfinite, keeps_inputs=settings.keep_inputs,
            early_warnings=EarlyWarnings(settings.warn, warn=self._warn),
        )  # fmt: skip
        self._parts = StepParts(context)
        self._calls = ModuleCalls(targets, context)
        with out_of_sight(), ExitStack() as undo:
            self._attachment: Attachment | None = Attachment(
                targets, observed, self._parts, replica=None, before_every_step=False, on_step=self._end_step,
                on_discovery=lambda: None, on_schedule=lambda *_: None, on_backward=lambda: None,
                on_joined=lambda _: None, containment=containment,
            )  # fmt: skip
            undo.callback(self._attachment.close)
            undo.enter_context(self._calls.attach())
            undo.enter_context(swapped_tensors.attach(self))
            undo.enter_context(tap_loss_scaler(self._parts.scaler_listener()))
            for root in targets.roots:
                _watched.add(root)
                undo.callback(_watched.discard, root)
            undo.callback(atexit.unregister, close_at_exit(self))
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (NonFiniteError, StoppedError, KeyboardInterrupt, SystemExit)):
            self._show_after(error)
        self.close()

    @property
    def step(self) -> int:
        """The step that the training is in, counted from 0."""
        return self._progress.step

    @property
    def skipped_steps(self) -> list[tuple[int, float | None]]:
        """Steps that a loss scaler has left out because of infinite gradients, with the loss scale; None if unknown."""
        return [
            (step, None if scale is None or scale.extent is None else scale.extent.largest)
            for step, scale in self._parts.skipped
        ]

    def show(self) -> None:
        """Print the frames that are kept now."""
        self._print("\n".join(self._journal.lines()))

    def close(self) -> None:
        """Remove every hook and let go of the model. Later calls do nothing."""
        undo, self._undo = self._undo, ExitStack()
        with out_of_sight(), undo:
            if self._attachment is not None:
                self._attachment.settle()
                self._context.reader.wait()
                self._attachment = None
                try:
                    self._context.judging.drain()
                except NonFiniteError as error:  # what a device found last: there is nothing left to stop
                    self._warn(str(error))
        self._progress.observing = False  # for hooks on a graph that outlives this
        self._context.judging.clear()
        self._journal.clear()
        self._parts.let_go()
        self._context.early_warnings.let_go()
        self._context.reader.forget()
        self._raised = None

    def _end_step(self, name: str) -> None:
        """A step of an optimizer has ended."""
        primary, step = name == self._progress.optimizer, self._progress.step
        if not primary:
            self._progress.end_step(name, observing=True)
            return
        missing = "" if self._has_warned or self._context.containment.is_disabled(CALLS) else self._unseen(step)
        try:
            self._context.reader.end_step()
            self._context.judging.drain()
        finally:
            self._parts.end_step()
            self._context.containment.run(
                "early_warnings", partial(self._context.early_warnings.end_step, step), always=False
            )
            self._calls.end_step()
            self._context.reader.forget()
            self._journal.end_step(step)
            if not self._context.judging.end_step():
                self._is_quiet = False
            self._progress.end_step(name, observing=True)
        if missing:
            self._has_warned = True
            self._warn(missing)
        if self._settings.abort_after is not None and step >= self._settings.abort_after:
            raise StoppedError(f"watch(abort_after={self._settings.abort_after}): step {step} has ended.")

    def _unseen(self, step: int) -> str:
        """A message about modules that were not seen in a step; usually empty.

        Modules that are not called are none of them, as long as their hooks are there.
        """
        unhooked = self._calls.unhooked
        if not self._calls.num_calls and (unhooked or not self._context.order):
            return _NO_CALLS.format(step=step)
        if not unhooked:
            return ""
        more = f" and {len(unhooked) - 1} more modules" if len(unhooked) > 1 else ""
        return _UNHOOKED.format(step=step, modules=f"{unhooked[0] or ROOT}{more}")

    def _detect(self, found: Found, moment: Moment) -> None:
        """Report an origin, and do what was asked for."""
        if self._is_quiet or self._journal.traces(moment.step):
            return
        self._is_quiet = self._settings.on_detect != "raise"
        if found.frame is not None:
            self._journal.add(found.frame, step=moment.step)
        message = f"rank {self._rank}: {found.message}" if self._rank is not None else found.message
        origin = Origin(
            step=moment.step, micro_step=moment.micro_step, rank=self._rank or 0, phase=found.phase, path=found.path,
            slot=found.slot, message=message,
        )  # fmt: skip
        report = "\n".join(self._report(origin, moment))
        self._print(f"\n{report}")
        saved, where = self._save(found, origin, report)
        origin = replace(origin, saved=saved)
        self.origins.append(origin)
        if callable(self._settings.on_detect):
            self._tell(self._settings.on_detect, origin)
            return
        message = f"Detected inf/nan during {moment}. {message} {where}".rstrip()
        if self._settings.on_detect == "raise":
            raise NonFiniteError(message)
        self._warn(message)

    def _tell(self, function: Callable[[Origin], object], origin: Origin) -> None:
        """Call the user's function; what it raises is meant for the training."""
        try:
            with in_sight():
                function(origin)
        except Exception as error:
            self._raised = error
            raise

    def _is_meant(self, error: Exception) -> bool:
        """True if an error in a hook is meant for the training."""
        return isinstance(error, (NonFiniteError, StoppedError)) or error is self._raised

    def _report(self, origin: Origin, moment: Moment) -> list[str]:
        lines = [f"Detected inf/nan during {moment}", *self._journal.lines(), "", origin.message]
        if self.skipped_steps:
            named = [f"{step} (scale {scale:g})" if scale else str(step) for step, scale in self.skipped_steps[-5:]]
            lines.append(
                f"Left out by the loss scaler before: {len(self.skipped_steps)} steps, last {', '.join(named)}."
            )
        return lines

    def _save(self, found: Found, origin: Origin, report: str) -> tuple[str | None, str]:
        """Save an origin; gives the directory, and what to say of it."""
        if self._settings.output is None:
            return None, ""
        place = Path(self._settings.output) / f"rank-{origin.rank:05d}-step-{origin.step:06d}-{len(self.origins)}"
        try:
            reason = save(place, found, origin, report)
        except Exception as error:  # noqa: BLE001  whatever it is, what was found must be said
            message = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._warn(f"watch(output={self._settings.output!r}): the tensors could not be saved: {message}")
            return None, ""
        if reason:
            return str(place), f"{place} holds what is known of it; it cannot be run again: {reason}."
        return str(place), f"traindiff rerun {place} runs it again."

    def _show_after(self, error: BaseException) -> None:
        """The training has raised an error of its own: what came before it may say why."""
        if self._journal.is_empty:
            return
        running = [call.path or "(root)" for call in self._calls.running()]
        inside = f" in {running[-1]}" if running else ""
        self._print(
            f"\n{type(error).__name__}{inside} during {Moment.now(self._progress)}; nothing was NaN or infinite before."
        )
        self.show()

    def _warn(self, message: str) -> None:
        try:
            warnings.warn(message, TraindiffWarning, stacklevel=2)
        except TraindiffWarning as warning:  # the user turned warnings into errors, which would end the training here
            _logger.warning("%s", warning)

    def _print(self, text: str) -> None:
        try:
            self._settings.file.write(f"{text}\n")
            self._settings.file.flush()
        except (OSError, ValueError) as error:  # full, closed, or of an encoding that lacks a letter
            if not self._is_mute:
                self._is_mute = True
                self._warn(f"watch(file=...): frames could not be printed: {error}")
