"""Judge what was read in the order in which it ran: as soon as it is known, and nothing before what came earlier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traindiff.observe.common.progress import Progress
from traindiff.observe.torch.nonfinite.frames import Frame, Journal
from traindiff.observe.torch.nonfinite.origin import Found
from traindiff.observe.torch.nonfinite.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When something was seen.

    Attributes:
        step: The step, counted from 0.
        micro_step: The micro-step in it.
        evaluating: Whether this is a forward pass without gradients.
        loss_scaled: Whether the loss was multiplied by a loss scale, and gradients may therefore be infinite.
    """

    step: int
    micro_step: int
    evaluating: bool
    loss_scaled: bool

    @classmethod
    def now(cls, progress: Progress) -> Moment:
        """The moment at which the training is."""
        return cls(
            step=progress.step, micro_step=progress.micro_step, evaluating=progress.evaluating,
            loss_scaled=progress.loss_scaled,
        )  # fmt: skip

    def __str__(self) -> str:
        """As headlines say it: `batch_number=1, micro-step 2`."""
        message = f"batch_number={self.step}"
        if self.evaluating:
            return f"an evaluation before {message}"
        return f"{message}, micro-step {self.micro_step}" if self.micro_step else message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    readings: Sequence[Reading]
    judge: Callable[[], Found | None]
    frame: Frame | None
    moment: Moment
    settles: bool


class Judging:
    """Hands on the first thing that is not finite.

    Args:
        journal: Gets each frame when it is judged.
        progress: Where the training is.
        on_found: Called with an origin, and when it was seen.

    Attributes:
        seen: Whether something that is not finite was found in this step, whatever was made of it.
    """

    def __init__(self, *, journal: Journal, progress: Progress, on_found: Callable[[Found, Moment], None]) -> None:
        self._journal = journal
        self._progress = progress
        self._on_found = on_found
        self._waiting: deque[_Event] = deque()
        self._held: Found | None = None
        self.seen = False

    def consider(
        self,
        readings: Sequence[Reading],
        judge: Callable[[], Found | None],
        *,
        frame: Frame | None = None,
        settles: bool = False,
        put_off: bool = False,
    ) -> None:
        """Judge what was read, now, or when it and all before it has arrived.

        Args:
            readings: What is looked at.
            judge: Called if one of them is not finite; gives the origin, or None where that is as it should be.
            frame: Kept from then on.
            settles: The optimizer uses these: what was held back of gradients that are scaled is the origin of them.
            put_off: Judge it with `drain`, because nothing can be raised here.
        """
        plain = not put_off and not self._waiting and all(reading.has_arrived for reading in readings)
        if plain and not any(reading.is_non_finite for reading in readings):
            if frame is not None:
                self._journal.add(frame, step=self._progress.step)
            return
        moment = Moment.now(self._progress)
        self._waiting.append(_Event(readings=readings, judge=judge, frame=frame, moment=moment, settles=settles))
        if not put_off:
            self.drain()

    def drain(self) -> None:
        """Judge everything that has arrived."""
        while self._waiting and all(reading.has_arrived for reading in self._waiting[0].readings):
            event = self._waiting.popleft()
            if event.frame is not None:
                self._journal.add(event.frame, step=event.moment.step)
            if not any(reading.is_non_finite for reading in event.readings):
                continue
            found = event.judge()
            if found is None:
                continue
            self.seen = True
            # No scale makes a loss NaN. It makes them infinite, and of infinite gradients come NaN.
            by_scale = found.phase == "backward" or (found.phase == "loss" and not event.readings[0].is_nan)
            if event.moment.loss_scaled and not event.settles and by_scale:
                self._held = self._held or found
                continue
            self._on_found(self._held or found, event.moment)

    def end_step(self) -> bool:
        """Forget what was held back in a step that has ended; gives whether anything in it was not finite."""
        seen, self.seen, self._held = self.seen, False, None
        return seen

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._held = None
