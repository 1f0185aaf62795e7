"""`traindiff.compare`: two recordings to a verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from traindiff.alignment.step_pairs import step_pairs
from traindiff.alignment.two_runs import AlignedStep, TwoRuns
from traindiff.comparison.direction_notes import with_directions
from traindiff.comparison.history import DifferenceHistory
from traindiff.comparison.running import Noise, RunningComparison
from traindiff.comparison.verdict import Comparison
from traindiff.directions import compare_directions
from traindiff.errors import ConfigError, Problem
from traindiff.floors.calibrating import calibrate, following
from traindiff.floors.replicas import Replicas, StepNoise
from traindiff.floors.tolerance import parse_tolerance
from traindiff.merging.renames import parse_renames
from traindiff.merging.run_steps import RunStep, run_steps
from traindiff.merging.step_table import Part
from traindiff.recording import Recording, open_recording
from traindiff.steps import StepSelection, parse_steps

Progress = Callable[[int], None]
"""Called with the number of each step after it was compared."""


def compare(
    baseline: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    noise: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    rename: Mapping[str, str] | Sequence[str] | None = None,
    steps: str | int | Iterable[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    history: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two recordings and name the first divergence.

    Args:
        baseline: Recording of the run that is trusted: a local path or any fsspec URL.
        candidate: Recording of the run in question.
        noise: Recordings of further correct runs of the baseline's training: replicas
            (`record(replica=...)`), or the baseline simply run again. Floors are measured from them, and the
            verdict is calibrated.
        rename: Regular expressions and replacements that turn the candidate's paths into the
            baseline's.
        steps: Steps to compare, e.g. `"0-9,20"`. Default: all that both have.
        rtol: Relative tolerance in place of floors: `||c - b|| <= rtol ||b|| + atol sqrt(n)`.
        atol: Absolute tolerance per element, in the same formula.
        history: Keep every site's difference in every step, in bounded memory, for a report that shows them.
        progress: Called after each step.

    Returns:
        The comparison; `print` it, or see `verdict`, `first_divergence` and `findings`.

    Raises:
        ConfigError: A setting is wrong.
        RecordingError: One of the recordings cannot be used.
    """
    selection = parse_steps(steps, where="compare(steps=...)")
    if not isinstance(selection, StepSelection):
        raise ConfigError("compare(...)", [selection], consequence="nothing was compared")
    tolerance = parse_tolerance(rtol, atol)
    renames = parse_renames(rename)
    runs = (open_recording(os.fspath(baseline)), open_recording(os.fspath(candidate)))
    paths = [noise] if isinstance(noise, (str, os.PathLike)) else noise
    replicas = [open_recording(os.fspath(path)) for path in paths]
    _refuse_candidate_as_noise(runs[1], replicas)
    comparison = RunningComparison(
        TwoRuns(runs, renames, selection), renames, tolerance=tolerance,
        noise=_Measured(runs[0], replicas, selection) if replicas else None,
        history=DifferenceHistory() if history else None,
    )  # fmt: skip
    streams = (run_steps(run, copies) for run, copies in zip(runs, comparison.runs.copies, strict=True))
    for both in step_pairs(*streams):
        step = _compared(comparison, *both)
        for one in both:
            if one is not None:
                one.release()
        if step is not None and progress:
            progress(step)
    directions = compare_directions(*runs, rename=renames, selection=selection)
    return with_directions(comparison.result(), directions)


def _compared(comparison: RunningComparison, baseline: RunStep | None, candidate: RunStep | None) -> int | None:
    """Number of a step that was compared. Nothing else of it is kept when the next one is read."""
    compared = comparison.feed(baseline, candidate)
    return None if compared is None else compared.aligned.step


def _refuse_candidate_as_noise(candidate: Recording, noise: Sequence[Recording]) -> None:
    """Raise `ConfigError` where the run in question is to say how far correct runs may be."""
    held = os.path.realpath(candidate.path)
    problems = [
        Problem(
            where=f"noise {recording.path}",
            what="is the candidate. Floors that are measured from it are above every difference that it has.",
            fix="Give recordings of runs that are known to be correct: replicas, or the baseline run again.",
        )
        for recording in noise
        if os.path.realpath(recording.path) == held
    ]
    if problems:
        raise ConfigError("compare(noise=...)", problems, consequence="nothing was compared")


class _Measured(Noise):
    """The noise that recordings show, of which all steps were looked at before the first one is judged."""

    def __init__(self, baseline: Recording, noise: Sequence[Recording], selection: StepSelection) -> None:
        self.calibration = calibrate(baseline, noise, selection)
        differing = {one.path for one in self.calibration.replicas}
        self._replicas = Replicas(following([recording for recording in noise if recording.path in differing]))

    def of_step(self, given: AlignedStep) -> StepNoise | None:
        """See `Noise`."""
        if (given.baseline.optimizer, given.step) not in self.calibration.covered:
            return None
        return self._replicas.noise(given.baseline, given.sides[0])

    @property
    def operators(self) -> Sequence[Sequence[Part]]:
        """See `Noise`."""
        return self._replicas.operators
