"""What a lockstep says: the configuration, losses and divergences on rank 0, the outcome on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import IO

from traindiff.comparison.verdict import Comparison
from traindiff.lockstep.effective_settings import SettingDifferences, Settings
from traindiff.lockstep.exchange import Outcome
from traindiff.lockstep.lines import divergence_lines, status_line
from traindiff.lockstep.live_comparison import LiveComparison
from traindiff.lockstep.settings import LockstepSettings


class Printer:
    """Prints as it goes.

    Args:
        settings: Of the lockstep.
        total: How many batches there are, if that is known.
        rank: This rank.
        file: Where to; None for standard output.
    """

    def __init__(self, settings: LockstepSettings, *, total: int | None, rank: int, file: IO[str] | None) -> None:
        self._settings = settings
        self._total = total
        self._rank = rank
        self._file = file
        self._differences = SettingDifferences()
        self._told = -1  # the batch of the latest status line

    def begin(self, floors: str) -> None:
        """The configuration.

        Args:
            floors: What decides where no tolerance is given.
        """
        self._on_rank_0(*self._settings.lines(self._total, floors), "")

    def settings(self, baseline: Settings, candidate: Settings) -> None:
        """What the sides are set to do, where that differs and was not said before."""
        self._on_rank_0(*self._differences.lines(baseline, candidate))

    def wants_losses(self, batch: int) -> bool:
        """Whether a batch's losses are printed, whatever comes of it."""
        is_last = self._total is not None and batch + 1 >= self._total
        return batch % self._settings.status_every == 0 or is_last

    def batch(self, batch: int, outcome: Outcome, comparison: LiveComparison) -> None:
        """What came of a batch."""
        if outcome.losses is not None and (outcome.diverged or self.wants_losses(batch)):
            self._status(batch, outcome.losses)
        if self._rank != 0:
            return
        for compared in outcome.compared:
            if compared.findings:
                first = comparison.latest.first_divergence
                says = first.says if first is not None and first.step == compared.aligned.step else ""
                indices = {path: number for number, path in enumerate(comparison.parameters)}
                self._on_rank_0(*divergence_lines(compared, batch=batch, indices=indices, first=says))

    def set_back(self, what: Sequence[str]) -> None:
        """The candidate was set back; `what` could not be."""
        if what:
            more = f" and {len(what) - 3} more" if len(what) > 3 else ""
            self._on_rank_0(f"  Not set back, since the sides do not both have it: {', '.join(what[:3])}{more}.")

    def last_status(self, batch: int, losses: Callable[[], tuple[float, float]]) -> None:
        """The losses of the last batch, unless they were printed."""
        if batch != self._told:
            self._status(batch, losses())

    def end(self, comparison: Comparison, *, passed: bool) -> None:
        """The outcome, on every rank."""
        if not passed and not comparison.findings:
            self._on_rank_0(*str(comparison).splitlines())
        self._write(f"TEST {'PASSED' if passed else 'FAILED'}")

    def _status(self, batch: int, losses: tuple[float, float]) -> None:
        self._told = batch
        self._on_rank_0(status_line(batch, self._total, *losses))

    def _on_rank_0(self, *lines: str) -> None:
        if self._rank == 0:
            for line in lines:
                self._write(line)

    def _write(self, line: str) -> None:
        """A line at once, so that those of several ranks do not mix."""
        file = self._file or sys.stdout
        file.write(f"{line}\n")
        file.flush()
