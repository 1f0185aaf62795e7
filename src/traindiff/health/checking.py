"""`traindiff.check`: one recording to a verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

from traindiff.errors import ConfigError
from traindiff.findings import Finding
from traindiff.findings.sentences import ranks_text
from traindiff.health.history import RunHistory
from traindiff.health.verdict import Verdict
from traindiff.merging.failed_taps import FailedTaps, without_lost
from traindiff.merging.run_steps import run_steps
from traindiff.recording import Run, open_recording
from traindiff.rules import RULES, run_facts
from traindiff.rules.run_judge import RunJudge
from traindiff.steps import StepSelection, parse_steps


def check(
    recording: str | os.PathLike[str],
    *,
    steps: str | int | Iterable[int] | None = None,
    history: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check one run by itself: no baseline is needed.

    * Copies agree: what several ranks hold of a parameter, its reduced gradient, its optimizer state or a
      setting is the same, and so is the random state of ranks that work on the same samples.
    * The optimizer does what its formula and settings say (docs/replay.md).
    * What a stage of a pipeline receives is what the one before it sent.
    * The gradient norms, clip coefficients and loss scales that the training logs fit what was recorded.
    * The gradient of a parameter that is embedding and head has what both contribute.
    * Parameters move, where steps pass that should move them.

    Args:
        recording: A local path or any fsspec URL.
        steps: Steps to check, e.g. `"0-9,20"`. Default: all.
        history: Keep the size of every site in every step, in bounded memory, for a report that shows them.
        progress: Called with the number of each step after it was checked.

    Returns:
        The verdict; `print` it, or see `verdict` and `findings`.

    Raises:
        ConfigError: `steps` cannot be read.
        RecordingError: The recording cannot be used.
    """
    selection = parse_steps(steps, where="check(steps=...)")
    if not isinstance(selection, StepSelection):
        raise ConfigError("check(...)", [selection], consequence="nothing was checked")
    run = open_recording(os.fspath(recording))
    judge = RunJudge(RULES, run_facts(run))
    found: dict[tuple[str, ...], Finding] = {}
    times: dict[tuple[str, ...], int] = {}
    checked: list[int] = []
    missing: dict[int, int] = {}  # by rank: the first step that it did not record
    failed = FailedTaps()
    kept = RunHistory() if history else None
    for step in run_steps(run):
        if step.step not in selection or not step.finished:
            continue
        checked.append(step.step)
        for rank in step.missing:
            missing.setdefault(rank, step.step)
        failed.see(step.table, step=step.step)
        table = without_lost(step.table, failed.lost)
        judge.note_unknown(table)
        if kept is not None:
            kept.note(table, step.step)
        for finding in judge.step(table, step=step.step):
            what = (finding.kind, finding.phase, finding.stage, finding.path, finding.slot)
            found.setdefault(what, finding)
            times[what] = times.get(what, 0) + 1
        if progress:
            progress(step.step)
        step.release()
    in_steps = [replace(one, evidence={**one.evidence, "num_steps": times[what]}) for what, one in found.items()]
    findings = tuple(sorted([*in_steps, *judge.end()], key=lambda one: one.step))
    gaps = [*failed.notes(), *_missing(run, missing)]
    if not checked:
        gaps.append(f"{run.path} has no finished step among those asked for.")
    return Verdict(
        recording=run.path,
        verdict="unhealthy" if findings else "incomplete" if gaps else "healthy",
        findings=findings,
        steps=tuple(dict.fromkeys(checked)),
        ranks=tuple(run.ranks),
        notes=(
            *gaps,
            *_endings(run),
            *(f"{reason}, so it is not checked." for reason in judge.unknown),
            *judge.notes(),
        ),
        history=kept,
    )


def _endings(run: Run) -> list[str]:
    """How ranks ended whose recording was not closed; all finished steps of them are checked."""
    return [status.says for rank in run.ranks if (status := run.status(rank)).says]


def _missing(run: Run, missing: dict[int, int]) -> list[str]:
    """What ranks that are missing, or end earlier than others, leave open."""
    notes = []
    if run.missing_ranks:
        left = "left no recording, so its copies are" if len(run.missing_ranks) == 1 else (
            "left no recordings, so their copies are"
        )  # fmt: skip
        notes.append(f"{ranks_text(run.missing_ranks)} {left} not checked.")
    if left_out := [rank for rank in missing if rank not in run.missing_ranks and rank not in run.ranks]:
        notes.append(
            f"The run was asked not to record {ranks_text(left_out, capital=False)}, so copies there are not checked."
        )
    notes += [
        f"Rank {rank} did not record step {missing[rank]}, which others did." for rank in missing if rank in run.ranks
    ]
    return notes
