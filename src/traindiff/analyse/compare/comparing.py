"""`traindiff.compare`: two recordings to a verdict.

The rule of msprobe's gradient monitor (0.97 in the first step, at most 0.03 less from step to step) is a note and never
a finding: it is a fixed limit. Elements whose gradients are near zero turn around by rounding alone, so that most of
the legal variations of a training break it (24 of 27, measured on a small GPT), while a gradient that is wrong by a
factor of 2 keeps it. The verdict rests on floors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from traindiff.analyse.align.site_map import SideNames, SiteMap
from traindiff.analyse.align.two_runs import AlignedStep
from traindiff.analyse.blocks.tasks import Workers, refuse_workers, tasks_of
from traindiff.analyse.collecting import few_collections
from traindiff.analyse.compare.earlier_states import with_earlier_states
from traindiff.analyse.compare.incremental import Noise, RunningComparison
from traindiff.analyse.compare.opened import ToCompare
from traindiff.analyse.compare.verdict import Comparison
from traindiff.analyse.findings import more_text, steps_text
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.merge.renames import parse_renames
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import Part
from traindiff.analyse.noise.hold_out import calibration_of, following
from traindiff.analyse.noise.measured import Replicas, StepNoise
from traindiff.analyse.noise.tolerance import parse_tolerance
from traindiff.analyse.signs import BrokenRule, Similarities, compare_directions
from traindiff.core.maps.accepted import accepted_of
from traindiff.core.maps.shipped import map_of
from traindiff.core.steps import StepSelection, parse_steps
from traindiff.errors import ConfigError, Problem
from traindiff.storage import Follower, Recording, not_following, open_followed, open_recording

_NAMED = 3


def with_directions(comparison: Comparison, found: Similarities | None) -> Comparison:
    """The comparison, with the similarities of signs and the notes on them."""
    if found is None:
        return comparison
    return replace(comparison, directions=found, notes=(*comparison.notes, *direction_notes(found)))


def direction_notes(found: Similarities) -> list[str]:
    """Sentences about the signs: how similar they are, where the rule is broken, what was not compared."""
    shares = [(one.share, step) for one, step in zip(found.summary, found.steps, strict=False) if one.share is not None]
    notes = []
    if shares:
        least, step = min(shares)
        notes.append(
            f"Directions of gradients: {least:.4f} of all elements agree at least (in step {step}), "
            f"over {steps_text([step for _, step in shares])}."
        )
    notes += [broken_text(step, list(same)) for step, same in groupby(found.broken, key=lambda one: one.step)][:_NAMED]
    more = len({one.step for one in found.broken}) - _NAMED
    if more > 0:
        notes.append(f"The rule is broken in {more} more step{'s' if more > 1 else ''}.")
    if found.broken:
        notes.append("That rule is a fixed limit, which correct runs break too, so the verdict does not rest on it.")
    if not found.zeros_known:
        notes.append("One of the runs does not tell zero from negative, so the two count as one direction in both.")
    for side, paths in zip(("baseline", "candidate"), found.only, strict=True):
        if paths:
            notes.append(f"Directions only in the {side}: {paths[0]}{more_text(len(paths) - 1, 'parameter')}.")
    if found.unknown:
        path, why = next(iter(found.unknown.items()))
        more_unknown = more_text(len(found.unknown) - 1, "parameter")
        notes.append(f"Directions not compared: {path} ({why}){more_unknown}.")
    return notes


def broken_text(step: int, broken: list[BrokenRule]) -> str:
    """A sentence about a step that breaks the rule: the parameters with the smallest similarities first."""
    parameters = sorted((one for one in broken if one.parameter is not None), key=lambda one: one.similarity)
    named = [f"{one.parameter} ({_share_text(one)})" for one in parameters[:_NAMED]]
    together = [f"all parameters together ({_share_text(one)})" for one in broken if one.parameter is None]
    further = more_text(len(parameters) - _NAMED, "parameter")
    where = f"{', '.join([*together, *named])}{further}"
    return f"The 0.97 / 0.03 rule of direction similarity is broken in step {step}: {where}."


def _share_text(one: BrokenRule) -> str:
    return f"{one.similarity:.4f}" if one.before is None else f"{one.similarity:.4f} after {one.before:.4f}"


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
    identical: bool = False,
    history: bool = False,
    offset: int | None = None,
    map: str | os.PathLike[str] | None = None,  # noqa: A002  as the option of the command
    accept: str | os.PathLike[str] | None = None,
    ignore: str | Iterable[str] | None = None,
    progress: Progress | None = None,
    follow: Follower | None = None,
    workers: Workers = None,
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
        identical: Demand the same bits. The first divergence is then the first site in execution order whose bits
            differ, however little.
        history: Keep every site's difference in every step, in bounded memory, for a report that shows them.
        offset: Compare each step k of the candidate with step k + offset of the baseline, for a run that continues
            from a checkpoint and counts its steps from 0. Left out, it is found: a candidate whose first parameters
            are those of the baseline's step N, but for rounding, begins there, and a note says so. 0 compares steps by
            their numbers.
        map: File that says which tensors and modules of the two runs are which, or the name of a map that traindiff
            has (traindiff explain maps).
        accept: File of intended differences, which are listed and not judged (traindiff explain maps).
        ignore: Globs over sites (a path, or a path and a slot) whose differences are counted and are no findings. If
            other sites may follow from such a difference, the verdict is `incomplete` at best.
        progress: Called after each step.
        follow: Waits for steps of a candidate that goes on. The verdict is given at its first divergence, or when it
            ends. Steps are then compared by their numbers.
        workers: Number of worker processes on this machine that read the recordings, or `"ray"` for those of a Ray
            cluster. The verdict is the same.

    Returns:
        The comparison; `print` it, or see `verdict`, `first_divergence` and `findings`.

    Raises:
        ConfigError: A setting is wrong.
        RecordingError: One of the recordings cannot be used.
        WorkerError: Worker processes died again and again.
    """
    selection = parse_steps(steps, where="compare(steps=...)")
    if not isinstance(selection, StepSelection):
        raise ConfigError("compare(...)", [selection], consequence="nothing was compared")
    tolerance = parse_tolerance(rtol, atol)
    refuse_workers(workers, follow, baseline, candidate)
    renames, entries, accepted = parse_renames(rename), map_of(map), accepted_of(accept, ignore)
    follower = follow or not_following()
    runs = (open_recording(os.fspath(baseline)), open_followed(os.fspath(candidate), follower))
    sites = SiteMap(entries, runs, renames)
    named = sites.rename
    _refuse_offset(follow, offset)
    paths = [noise] if isinstance(noise, (str, os.PathLike)) else noise
    replicas = [open_recording(os.fspath(path)) for path in paths]
    _refuse_compared_as_noise(runs, replicas)

    given = ToCompare(
        baseline=runs[0], candidate=runs[1], renames=renames, named=named, entries=entries, selection=selection,
        from_first=bool(replicas),  # they are held against each other from the first step on
        is_followed=follow is not None,
    )  # fmt: skip
    with tasks_of(workers) as tasks, few_collections():
        opened = given.opened(tasks, offset)
        comparison = RunningComparison(
            opened.runs, tolerance=tolerance, identical=identical,
            noise=_Measured(runs[0], replicas, selection, sites.sides[0]) if replicas else None,
            history=DifferenceHistory() if history else None, accepted=accepted,
        )  # fmt: skip
        for both in opened.pairs:
            if opened.recordings[1].says_more():
                comparison.learn(opened.recordings[1])
            step, has_findings = _compared(comparison, *both)
            for one in both:
                if one is not None:
                    one.release()
            if step is not None and progress:
                progress(step)
            if follower.is_following and follower.is_enough(has_findings and bool(comparison.result().findings)):
                break
    directions = compare_directions(*opened.recordings, rename=named, selection=selection)
    found = with_directions(comparison.result(), directions)
    found = with_earlier_states(found, opened.recordings, named)
    if opened.lost and found.verdict in ("identical", "equivalent"):
        found = replace(found, verdict="incomplete")
    notes = [*follower.notes(), *opened.notes(found.findings)]
    return replace(found, notes=(*notes, *found.notes)) if notes else found


def _compared(
    comparison: RunningComparison, baseline: RunStep | None, candidate: RunStep | None
) -> tuple[int | None, bool]:
    """Number of a step that was compared, and whether it has findings. Nothing else of it is kept."""
    compared = comparison.feed(baseline, candidate)
    return (None, False) if compared is None else (compared.step, bool(compared.findings))


def _refuse_offset(follow: Follower | None, offset: int | None) -> None:
    """Raise `ConfigError` if a run that goes on is to be compared with steps of other numbers."""
    if follow is None or not offset:
        return
    what = "follows a run, and compares its steps with those of other numbers."
    fix = "Leave out the offset while the run goes on, or compare when it has ended."
    problem = Problem(where=f"compare(follow=..., offset={offset})", what=what, fix=fix)
    raise ConfigError("compare(...)", [problem], consequence="nothing was compared")


def _refuse_compared_as_noise(runs: tuple[Recording, Recording], noise: Sequence[Recording]) -> None:
    """Raise `ConfigError` if one of the runs that are compared is given as a noise recording too."""
    whats = (
        "is the baseline. It does not differ from itself, which says nothing of how far correct runs may differ.",
        "is the candidate. Floors that are measured from it are above every difference that it has.",
    )
    fix = "Give recordings of runs that are known to be correct: replicas, or the baseline run again."
    problems = [
        Problem(where=f"noise {recording.path}", what=what, fix=fix)
        for recording in noise
        for run, what in zip(runs, whats, strict=True)
        if os.path.realpath(recording.path) == os.path.realpath(run.path)
    ]
    if problems:
        raise ConfigError("compare(noise=...)", problems, consequence="nothing was compared")


class _Measured(Noise):
    """Noise from recordings. All their steps are read once before the first step is judged."""

    def __init__(
        self, baseline: Recording, noise: Sequence[Recording], selection: StepSelection, names: SideNames
    ) -> None:
        self.calibration = calibration_of(baseline, noise, selection)
        differing = {one.path for one in self.calibration.replicas}
        self._replicas = Replicas(following([recording for recording in noise if recording.path in differing]), names)

    def of_step(self, given: AlignedStep) -> StepNoise | None:
        """Differences of the replicas in a step; None if no replica has it."""
        if (given.baseline.optimizer, given.step) not in self.calibration.covered:
            return None
        noise = self._replicas.noise(given.baseline, given.recorded[0])
        self.earlier = self._replicas.earlier
        return noise

    @property
    def operators(self) -> Sequence[Sequence[Part]]:
        """Operators of the replicas in the latest step."""
        return self._replicas.operators
