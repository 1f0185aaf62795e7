"""The lines that rank 0 prints of a lockstep: its configuration, losses, divergences and outcome."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from traindiff.analyse.compare.verdict import Comparison
from traindiff.run.lockstep.divergences import divergence_lines
from traindiff.run.lockstep.live_comparison import LiveComparison, Outcome
from traindiff.run.lockstep.live_side import UNKNOWN, Settings
from traindiff.run.lockstep.settings import LockstepSettings


def status_line(batch: int, total: int | None, baseline: float, candidate: float) -> str:
    """The losses of both sides; NaN for a side that gives none, `?` for an unknown total."""
    apart = abs(candidate - baseline)
    share = apart / abs(baseline) if baseline else (math.inf if apart else 0.0)
    return (
        f"STATUS batch={batch} / {'?' if total is None else total} base_loss={_shown_loss(baseline)} "
        f"test_loss={_shown_loss(candidate)} abs_diff={apart:.5e} rel_diff={share:.5e}"
    )


def _shown_loss(loss: float) -> str:
    """A loss as ModelStepper prints it, unless that would hide most of its digits."""
    return f"{loss:.5e}" if 0.0 < abs(loss) < 1e-2 or abs(loss) >= 1e6 else f"{loss:.5f}"


class SettingDifferences:
    """Reports each difference between the settings of two sides once, when it first appears."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str, str]] = set()

    def lines(self, baseline: Settings, candidate: Settings) -> Iterator[str]:
        """One line for each new difference."""
        for name in [*baseline, *(name for name in candidate if name not in baseline)]:
            changes: dict[tuple[str, str], int] = {}
            for path, before, after in _common(baseline.get(name, {}), candidate.get(name, {})):
                if not _same_setting(before, after):
                    change = _shown_setting(name, before), _shown_setting(name, after)
                    changes[change] = changes.get(change, 0) + 1
                    whole = not path
            for (before, after), count in changes.items():
                if (name, before, after) not in self._told:
                    self._told.add((name, before, after))
                    of = "" if whole else f" parameters={count}"
                    yield f"SETTING DIFFERS name={name} baseline={before} candidate={after}{of}"


def _common(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for path, value in baseline.items():
        if path in candidate:
            yield path, value, candidate[path]


def _same_setting(baseline: Any, candidate: Any) -> bool:
    if UNKNOWN in (baseline, candidate) or baseline == candidate:
        return True
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (baseline, candidate))
    return numbers and math.isclose(baseline, candidate, rel_tol=1e-9)


def _shown_setting(name: str, value: Any) -> str:
    if name == "gradient_clipping" and value == 0.0:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


class Printer:
    """Prints the lines of a lockstep as it proceeds.

    Args:
        settings: Those of the lockstep.
        total: The number of batches that is printed, if known.
        last: Number of the last batch, if known.
        rank: This rank.
        file: Where to print; None for standard output.
    """

    def __init__(
        self, settings: LockstepSettings, *, total: int | None, last: int | None, rank: int, file: IO[str] | None
    ) -> None:
        self._settings = settings
        self._total = total
        self._last = last
        self._rank = rank
        self._file = file
        self._differences = SettingDifferences()
        self._told = -1  # the batch of the latest status line

    def begin(self, floors: str) -> None:
        """Print the configuration; `floors` is the source of the tolerances that the user left out."""
        self._on_rank_0(*self._settings.lines(self._total, floors), "")

    def settings(self, baseline: Settings, candidate: Settings) -> None:
        """Print new differences between the settings of the sides."""
        self._on_rank_0(*self._differences.lines(baseline, candidate))

    def wants_losses(self, batch: int) -> bool:
        """True if a batch's losses are printed whatever its outcome."""
        return batch % self._settings.status_every == 0 or batch == self._last

    def batch(self, batch: int, outcome: Outcome, comparison: LiveComparison) -> None:
        """Print the outcome of a batch."""
        for compared in outcome.compared:  # on rank 0 only
            if compared.findings:
                first = comparison.latest.first_divergence
                message = first.message if first is not None and first.step == compared.step else ""
                indices = {path: number for number, path in enumerate(comparison.trainable_parameters)}
                self._on_rank_0(*divergence_lines(compared, batch=batch, indices=indices, first=message))
        if outcome.losses is not None and (outcome.diverged or self.wants_losses(batch)):
            self._status(batch, outcome.losses)

    def set_back(self, what: Sequence[str]) -> None:
        """Print which sites could not be reset to the baseline's state."""
        if what:
            more = f" and {len(what) - 3} more" if len(what) > 3 else ""
            self._on_rank_0(f"  Not set back, since the sides do not both have it: {', '.join(what[:3])}{more}.")

    def last_status(self, batch: int, losses: Callable[[], tuple[float, float]]) -> None:
        """Print the losses of the last batch, unless they were printed."""
        if batch != self._told:
            self._status(batch, losses())

    def end(self, comparison: Comparison, *, passed: bool) -> None:
        """Print the outcome."""
        if not passed and not comparison.findings:
            self._on_rank_0(*str(comparison).splitlines())
        self._on_rank_0(f"TEST {'PASSED' if passed else 'FAILED'}")

    def _status(self, batch: int, losses: tuple[float, float]) -> None:
        self._told = batch
        self._on_rank_0(status_line(batch, self._total, *losses))

    def _on_rank_0(self, *lines: str) -> None:
        """Write and flush line by line, because another rank's output may go to the same place."""
        if self._rank == 0:
            file = self._file or sys.stdout
            for line in lines:
                file.write(f"{line}\n")
                file.flush()
