"""`traindiff.check`: one recording to a verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from traindiff.analyse.check.chosen_rules import CONSEQUENCE, chosen_rules
from traindiff.analyse.check.verdict import RunHistory, Verdict
from traindiff.analyse.findings import Finding, phase_text, ranks_text
from traindiff.analyse.merge.parameters import Updates
from traindiff.analyse.merge.run_steps import RunStep, run_steps
from traindiff.analyse.merge.unobserved import FailedTaps, without_lost
from traindiff.analyse.rules import run_facts
from traindiff.analyse.rules.run_judge import RunJudge
from traindiff.core.observation import Observation
from traindiff.core.site import label
from traindiff.core.steps import ALL_STEPS, StepSelection, parse_steps
from traindiff.errors import ConfigError
from traindiff.storage import Run, open_recording


class Endings:
    """Follows each rank to its last step.

    Args:
        run: The run.
        selection: Steps that are wanted of it.
    """

    def __init__(self, run: Run, selection: StepSelection) -> None:
        self._run = run
        self._selection = selection
        self._last: dict[int, Observation] = {}
        self._finished: dict[int, dict[str, int]] = {}  # the last finished step, by rank and optimizer

    def see(self, step: RunStep) -> None:
        """Take note of a step, wanted or not."""
        self._last.update(step.last)
        if step.finished:
            for rank in step.last:
                self._finished.setdefault(rank, {})[step.optimizer] = step.step

    def sentences(self) -> tuple[list[str], list[str]]:
        """About ranks that were killed or aborted: those that lack steps that are wanted, and those that do not."""
        lacking: list[str] = []
        whole: list[str] = []
        for rank in self._run.ranks:
            status = self._run.status(rank)
            if status.ending != "closed":
                (lacking if self._lacks_steps(rank) else whole).append(f"{status.message} {self._came_to(rank)}")
        return lacking, whole

    def _lacks_steps(self, rank: int) -> bool:
        """Whether the rank would have recorded a further step that is wanted, had it come so far."""
        settings = self._run.run["settings"]
        recorded = parse_steps(settings.get("steps"), where="run.json")
        last = min(self._finished.get(rank, {}).values(), default=-1)
        return self._selection.has_after(
            last,
            within=recorded if isinstance(recorded, StepSelection) else ALL_STEPS,
            every=settings.get("every", 1),
        )

    def _came_to(self, rank: int) -> str:
        """The last step and the last observation of a rank."""
        seen = self._last.get(rank)
        if seen is None:
            return "It has observed nothing."
        finished = max(self._finished.get(rank, {}).values(), default=None)
        steps = "It has finished no step" if finished is None else f"Its last finished step is {finished}"
        micro = f", micro-step {seen.micro_step}" if seen.micro_step else ""
        where = f"{phase_text(seen.phase, seen.stage)} {label(seen.path, seen.slot)} in step {seen.step}{micro}"
        return f"{steps}; its last observation is {where}."


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
