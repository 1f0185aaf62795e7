"""`traindiff.check`: one recording to a verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from traindiff.errors import ConfigError
from traindiff.findings import Finding
from traindiff.findings.sentences import ranks_text
from traindiff.health.chosen_rules import CONSEQUENCE, chosen_rules
from traindiff.health.endings import Endings
from traindiff.health.history import RunHistory
from traindiff.health.verdict import Verdict
from traindiff.merging.failed_taps import FailedTaps, without_lost
from traindiff.merging.run_steps import run_steps
from traindiff.merging.updates import Updates
from traindiff.recording import Run, open_recording
from traindiff.rules import run_facts
from traindiff.rules.run_judge import RunJudge
from traindiff.steps import StepSelection, parse_steps


def check(
    recording: str | os.PathLike[str],
    *,
    steps: str | int | Iterable[int] | None = None,
    rules: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Mapping[str, float]] | None = None,
    history: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check one run by itself: no baseline is needed.

    A run is held against rules, which docs/rules.md describes one by one: where it first is not finite, gradients that
    vanish or explode, parameters that nothing moves, dead units, spikes of the loss, skipped steps, learning rates
    that stay 0, optimizers that do something else than their settings say, ranks that disagree, and more. Some of them
    only warn: what they find is worth knowing, and leaves a run healthy.

    Args:
        recording: A local path or any fsspec URL.
        steps: Steps to check, e.g. `"0-9,20"`. Default: all. A run that was killed or aborted is `incomplete` unless
            it has finished all the steps that are asked for.
        rules: Names of the rules to ask, e.g. `"non-finite,spike"`. Default: all.
        skip: Names of rules to leave out.
        config: Limits in place of the rules' own: a TOML file with a table `[RULE]` of `LIMIT = NUMBER` for each, or
            such a mapping.
        history: Keep the size of every site in every step, in bounded memory, for a report that shows them.
        progress: Called with the number of each step after it was checked.

    Returns:
        The verdict; `print` it, or see `verdict`, `findings` and `warnings`.

    Raises:
        ConfigError: `steps` or `config` cannot be read, or names a rule or a limit that there is not.
        RecordingError: The recording cannot be used.
    """
    selection = parse_steps(steps, where="check(steps=...)")
    if not isinstance(selection, StepSelection):
        raise ConfigError("check(...)", [selection], consequence=CONSEQUENCE)
    chosen = chosen_rules(rules, skip, config)
    run = open_recording(os.fspath(recording))
    judge = RunJudge(chosen.rules, run_facts(run), limits=chosen.limits)
    found = _Found()
    updates = Updates()
    checked: list[int] = []
    missing: dict[int, int] = {}  # by rank that has recorded anything: the first step that it did not record
    failed = FailedTaps()
    kept = RunHistory() if history else None
    endings = Endings(run, selection)
    for step in run_steps(run):
        endings.see(step)
        if step.step not in selection:
            continue
        if not step.finished:
            found.add(judge.unfinished(without_lost(step.table, failed.lost), step=step.step))
            continue
        checked.append(step.step)
        for rank in sorted({*run.ranks} - step.last.keys()):
            missing.setdefault(rank, step.step)
        failed.see(step.table, step=step.step)
        table = without_lost(step.table, failed.lost)
        if kept is not None:
            kept.note(table, step.step)
        table |= {entry.key: entry for entry in updates.derive(table, step=step.step)[0]}
        judge.note_unknown(table)
        found.add(judge.step(table, step=step.step))
        if progress:
            progress(step.step)
        table.clear()
        step.release()
    everything = sorted([*found.first_ones(), *judge.end()], key=lambda one: one.step)
    findings = tuple(one for one in everything if not judge.is_warning(one))
    lacking, whole = endings.sentences()
    gaps = [*lacking, *failed.notes(), *_missing(run, missing)]
    if not checked:
        gaps.append(f"{run.path} has no finished step among those asked for.")
    return Verdict(
        recording=run.path,
        verdict="unhealthy" if findings else "incomplete" if gaps else "healthy",
        findings=findings,
        warnings=tuple(one for one in everything if judge.is_warning(one)),
        steps=tuple(dict.fromkeys(checked)),
        ranks=tuple(run.ranks),
        notes=(
            *gaps,
            *whole,
            *(f"{reason}, so it is not checked." for reason in judge.unknown),
            *judge.notes(),
        ),
        history=kept,
    )


class _Found:
    """Findings of single steps: of what is wrong in several of them, the first, with their number."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], Finding] = {}
        self._times: dict[tuple[str, ...], int] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            what = (finding.kind, finding.phase, finding.stage, finding.path, finding.slot)
            self._first.setdefault(what, finding)
            self._times[what] = self._times.get(what, 0) + 1

    def first_ones(self) -> list[Finding]:
        times = self._times
        return [replace(one, evidence={**one.evidence, "num_steps": times[what]}) for what, one in self._first.items()]


def _missing(run: Run, missing: dict[int, int]) -> list[str]:
    """What ranks that are missing, or end earlier than others, leave open."""
    notes = []
    absent = run.missing_ranks
    if absent:
        left = "left no recording, so its copies are" if len(absent) == 1 else "left no recordings, so their copies are"
        notes.append(f"{ranks_text(absent)} {left} not checked.")
    wanted = {*run.ranks, *absent}
    if left_out := [rank for rank in range(run.world_size) if rank not in wanted]:
        notes.append(
            f"The run was asked not to record {ranks_text(left_out, capital=False)}, so copies there are not checked."
        )
    notes += [f"Rank {rank} did not record step {missing[rank]}, which others did." for rank in missing]
    return notes
