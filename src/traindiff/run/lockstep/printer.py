"""The printed lines of a lockstep: configuration, losses and divergences on rank 0, the outcome on every rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import IO, Any

from traindiff.analyse.align.exact import EXACT_KINDS
from traindiff.analyse.compare.incremental import ComparedStep
from traindiff.analyse.compare.verdict import Comparison
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.observation import ALL_GRADIENTS
from traindiff.core.summary import distance, nonfinite_count, norm
from traindiff.run.lockstep.live_comparison import LiveComparison, Outcome
from traindiff.run.lockstep.live_side import UNKNOWN, Settings
from traindiff.run.lockstep.settings import LockstepSettings

MOST_LINES = 8
"""Most lines for one kind of divergence in one batch; the rest is only counted."""

_PARAMETERS = ("PARAMETER", "GRADIENT", "STATE")


def status_line(batch: int, total: int | None, baseline: float, candidate: float) -> str:
    """The losses of both sides; NaN for a side that gives none, `?` for an unknown total."""
    apart = abs(candidate - baseline)
    share = apart / abs(baseline) if baseline else (math.inf if apart else 0.0)
    return (
        f"STATUS batch={batch} / {'?' if total is None else total} base_loss={baseline:.6g} test_loss={candidate:.6g} "
        f"abs_diff={apart:.5e} rel_diff={share:.5e}"
    )


def divergence_lines(compared: ComparedStep, *, batch: int, indices: Mapping[str, int], first: str) -> Iterator[str]:
    """A line for each divergence of a step, and below the first one of each kind an indented description.

    Args:
        compared: The step.
        batch: Number of the batch in which it ended.
        indices: Number of each parameter in the model's order, by path.
        first: Description of the first finding.
    """
    pairs = {pair.baseline.key: pair for pair in compared.aligned.aligned.pairs}
    for what, group in groupby(_in_order(_without_derived(compared.findings)), key=_what):
        found = list(group)
        looks: set[str] = set()
        for finding in found[:MOST_LINES]:
            yield _line(what, finding, pairs, batch=batch, indices=indices)
            if finding.kind not in looks and what != "MISALIGNED":
                yield f"  {first if finding is compared.findings[0] and first else finding.message}"
            looks.add(finding.kind)
        if len(found) > MOST_LINES:
            yield f"  The same holds for {len(found) - MOST_LINES} more."


def _without_derived(findings: Sequence[Finding]) -> list[Finding]:
    """The findings without the norm of all gradients, if it follows from a reported gradient."""
    told = any(one.phase == "grad" and one.path != ALL_GRADIENTS for one in findings)
    return [one for one in findings if not (told and one.path == ALL_GRADIENTS and one.slot == "norm")]


def _in_order(findings: Sequence[Finding]) -> list[Finding]:
    """The findings grouped by kind, kinds in the order of their first finding."""
    kinds = list(dict.fromkeys(map(_what, findings)))
    return sorted(findings, key=lambda finding: kinds.index(_what(finding)))


def _what(finding: Finding) -> str:
    if finding.kind in EXACT_KINDS:
        return "MISALIGNED"
    if finding.phase == "param" and finding.slot == "buffer":
        return "BUFFER"
    return {
        "grad": "GRADIENT", "loss": "LOSS", "forward": "ACTIVATION", "backward": "ACTIVATION", "optimizer": "STATE",
    }.get(finding.phase, "PARAMETER")  # fmt: skip


def _line(what: str, finding: Finding, pairs: Mapping[SiteKey, Pair], *, batch: int, indices: Mapping[str, int]) -> str:
    if what == "MISALIGNED":
        return f"MISALIGNED batch={batch} {finding.message}"
    pair = _pair(finding, pairs)
    if pair is not None and pair.candidate.apart:
        rank, (absolute, relative, floor) = _farthest_copy(finding, pair)
    else:
        rank = finding.rank if finding.rank is not None else _first_rank(pair)
        absolute, relative, floor = _sizes(finding, pair)
    fields = [f"DIVERGED {what} rank={rank} batch={batch}"]
    if what in _PARAMETERS:
        fields.append(f"param_idx={indices.get(finding.path, -1)}")
    if what != "LOSS":
        fields.append(f"name={'*' if finding.path == ALL_GRADIENTS else finding.path}")
    if what in ("ACTIVATION", "STATE"):
        fields.append(f"slot={finding.slot}")
    fields.append(f"abs_diff={absolute:.5e} rel_diff={relative:.5e} tol={floor:.5e}")
    if what == "ACTIVATION":
        fields.append(f"phase={finding.phase}")
    elif finding.stage:
        fields.append(f"stage={finding.stage}")
    return " ".join(fields)


def _pair(finding: Finding, pairs: Mapping[SiteKey, Pair]) -> Pair | None:
    """The site of a finding in both runs; for an update of a parameter, the parameter after it."""
    phase, slot = ("param", "value") if finding.phase == "update" else (finding.phase, finding.slot)
    found = (pair for key, pair in pairs.items() if key[:5] == (phase, finding.stage, finding.path, slot, finding.call))
    return next(found, None)


def _first_rank(pair: Pair | None) -> int:
    return min((part.rank for part in pair.candidate.parts), default=0) if pair is not None else 0


def _farthest_copy(finding: Finding, pair: Pair) -> tuple[int, tuple[float, float, float]]:
    """Among copies that should be equal, the rank whose copy is farthest from the baseline's, and its sizes."""
    ranks = {part.rank: part.summary for part in pair.candidate.parts}
    apart = {rank: float(distance(pair.baseline.summary, summary)) for rank, summary in ranks.items()}
    rank = max(apart, key=lambda one: (apart[one], -one))
    size = float(norm(pair.baseline.summary))
    return rank, (apart[rank], apart[rank] / size if size else math.inf, finding.floor)


def _sizes(finding: Finding, pair: Pair | None) -> tuple[float, float, float]:
    """L2 norm of the difference, the same relative to the baseline, and the largest accepted one.

    An update is judged relative to itself, but printed relative to its parameter.
    """
    if pair is None or pair.baseline.shape != pair.candidate.shape:
        return finding.difference, finding.difference, finding.floor
    baseline, candidate = pair.baseline.summary, pair.candidate.summary
    if int(nonfinite_count(baseline)) or int(nonfinite_count(candidate)):
        return math.nan, math.nan, finding.floor
    size = float(norm(baseline))
    if finding.phase == "update":
        update = finding.evidence.get("baseline_norm", 0.0)
        whole = update if math.isfinite(finding.difference) else 0.0
        absolute = finding.difference * whole if whole else float(distance(baseline, candidate))
        share = absolute / size if size else math.inf
        return absolute, share, finding.floor * update / size if size and update else 0.0
    if not math.isfinite(finding.difference):
        return finding.difference, finding.difference, finding.floor
    return finding.difference * size, finding.difference, finding.floor


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
    """Prints the lines of a lockstep as it proceeds; `total` is the number of batches, if known."""

    def __init__(self, settings: LockstepSettings, *, total: int | None, rank: int, file: IO[str] | None) -> None:
        self._settings = settings
        self._total = total
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
        is_last = self._total is not None and batch + 1 >= self._total
        return batch % self._settings.status_every == 0 or is_last

    def batch(self, batch: int, outcome: Outcome, comparison: LiveComparison) -> None:
        """Print the outcome of a batch."""
        if outcome.losses is not None and (outcome.diverged or self.wants_losses(batch)):
            self._status(batch, outcome.losses)
        if self._rank != 0:
            return
        for compared in outcome.compared:
            if compared.findings:
                first = comparison.latest.first_divergence
                message = first.message if first is not None and first.step == compared.aligned.step else ""
                indices = {path: number for number, path in enumerate(comparison.parameters)}
                self._on_rank_0(*divergence_lines(compared, batch=batch, indices=indices, first=message))

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
        """Print the outcome, on every rank."""
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
        """Write and flush one line, so that lines of several ranks do not mix."""
        file = self._file or sys.stdout
        file.write(f"{line}\n")
        file.flush()
