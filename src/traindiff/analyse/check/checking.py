"""`traindiff.check`: one recording to a verdict."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from traindiff.analyse import next_commands
from traindiff.analyse.blocks.steps import steps_of
from traindiff.analyse.blocks.tasks import Workers, refuse_workers
from traindiff.analyse.check.chosen_rules import CONSEQUENCE, chosen_rules
from traindiff.analyse.check.ignored_sites import IgnoredSites
from traindiff.analyse.collecting import few_collections
from traindiff.analyse.findings import Finding, also_text, grouped, phase_text, ranks_text, steps_text, where_text
from traindiff.analyse.merge.history import RunHistory
from traindiff.analyse.merge.indexed import indexed
from traindiff.analyse.merge.parameters import Updates
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.unobserved import FailedTaps, unrecorded_of, without_lost
from traindiff.analyse.products import ProductCheck, ProductTable, product_checks
from traindiff.analyse.rules import RULES, run_facts
from traindiff.analyse.rules.run_judge import Answer, AskedRule, RunJudge
from traindiff.core.observation import Observation
from traindiff.core.shown import Shown
from traindiff.core.site import label
from traindiff.core.steps import ALL_STEPS, StepSelection, parse_steps
from traindiff.errors import ConfigError
from traindiff.storage import Follower, Recording, Run, not_following, open_followed

Word = Literal["healthy", "unhealthy", "incomplete"]

EXIT_CODES: Mapping[Word, int] = {"healthy": 0, "unhealthy": 1, "incomplete": 3}
"""Exit codes of `traindiff check`."""

SCHEMA_NAME = "traindiff-check"

SCHEMA_VERSION = 1

MEANINGS: Mapping[Word, str] = {
    "healthy": "no rule is broken",
    "unhealthy": "the run breaks rules that it should keep by itself",
    "incomplete": "no rule is broken in what was recorded, but a part of the run was not",
}
"""Meaning of each word."""


_ANSWERS: Mapping[Answer, str] = {
    "broken": "broken", "warned": "warned", "ignored": "ignored", "nothing found": "found nothing",
    "not applicable": "not applicable (the run has nothing that they judge, or too few steps)",
}  # fmt: skip
"""Answers of rules, as a sentence counts them."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict(Shown):
    """The result of checking one recording; `str()` of it is the report in the terminal.

    Attributes:
        recording: Its path.
        verdict: `healthy`, `unhealthy` or `incomplete`.
        findings: Faults, in the order of the training. A fault in several steps is there once, with `num_steps` in its
            evidence.
        warnings: Findings that leave the run healthy, in the same order.
        steps: Steps that were checked, ascending.
        ranks: Ranks that were recorded.
        notes: What limits the verdict, one sentence each.
        history: The size of every site in every step; None unless requested. Not part of the JSON.
        products: How exact matrix products and convolutions are, by operator and line; None if the run did not record
            that.
        rules: The rules that were asked, with their answers.
        ignored_sites: Number of sites at which something was found and is ignored.
    """

    recording: str
    verdict: Word
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    notes: tuple[str, ...]
    history: RunHistory | None = field(default=None, compare=False, repr=False)
    products: ProductTable | None = None
    rules: tuple[AskedRule, ...] = ()
    ignored_sites: int = 0

    @property
    def exit_code(self) -> int:
        """Exit code of `traindiff check`: 0 healthy, 1 unhealthy, 3 incomplete."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "recording": self.recording,
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.findings],
            "warnings": [warning.to_json() for warning in self.warnings],
            "steps": list(self.steps),
            "ranks": list(self.ranks),
            "notes": list(self.notes),
            "products": None if self.products is None else self.products.to_json(),
            "next": next_commands.of_check(self.recording, self.findings or self.warnings),
            "rules": [rule.to_json() for rule in self.rules],
            "ignored_sites": self.ignored_sites,
        }

    def sentence(self) -> str:
        """The word, its meaning, and the steps and ranks that were checked."""
        if not self.steps:
            return f"{self.verdict}: nothing could be checked"
        count = len(self.ranks)
        where = f" on {count} ranks" if count > 1 else ""
        warned = len(grouped(self.warnings))
        also = f"; {warned} warning{'s' if warned > 1 else ''}" if warned else ""
        return f"{self.verdict}: {MEANINGS[self.verdict]}, over {steps_text(self.steps)}{where}{also}"

    def __str__(self) -> str:
        lines = [self.sentence()]
        for word, findings in (("", self.findings), ("Warning: ", self.warnings)):
            for group in grouped(findings):
                message = " ".join(filter(None, (group.first.said, also_text(group.paths))))
                lines += ["", f"{word}{where_text(group.first)}", f"  {message}"]
        for more in ([self.rules_sentence()], self.notes):
            lines += ["", *more] if any(more) else []
        return "\n".join(lines)

    def rules_sentence(self) -> str:
        """How many rules gave which answer, and how many were not asked; empty if none was asked."""
        if not self.rules:
            return ""
        counts = Counter(rule.result for rule in self.rules)
        said = ", ".join(f"{counts[answer]} {words}" for answer, words in _ANSWERS.items() if counts[answer])
        left_out = len(RULES) - len(self.rules)
        also = f"; {left_out} more {'was' if left_out == 1 else 'were'} not asked" if left_out else ""
        return f"{len(self.rules)} rule{'s' if len(self.rules) > 1 else ''}: {said}{also}."


@few_collections()
def check(
    recording: str | os.PathLike[str],
    *,
    steps: str | int | Iterable[int] | None = None,
    rules: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Mapping[str, float]] | None = None,
    ignore: str | Iterable[str] | None = None,
    history: bool = False,
    progress: Callable[[int], None] | None = None,
    follow: Follower | None = None,
    workers: Workers = None,
) -> Verdict:
    """Check one run by itself: no baseline is needed.

    A run is held against rules, which `traindiff explain rules` describes one by one: where it first is not finite,
    gradients that vanish or explode, parameters that nothing moves, dead units, spikes of the loss, skipped steps,
    learning rates that stay 0, optimizers that do something else than their settings say, ranks that disagree, and
    more. Some of them only warn: what they find is worth knowing, and leaves a run healthy.

    Args:
        recording: A local path or any fsspec URL.
        steps: Steps to check, e.g. `"0-9,20"`. Default: all. A run that was killed or aborted is `incomplete` unless
            it has finished all the steps that are asked for.
        rules: Names of the rules to ask, e.g. `"non-finite,spike"`. Default: all.
        skip: Names of rules to leave out.
        config: Limits in place of the rules' own: a TOML file with a table `[RULE]` of `LIMIT = NUMBER` for each, or
            such a mapping.
        ignore: Globs over sites (a path, or a path and a slot) at which what is found is counted and is no finding.
        history: Keep the size of every site in every step, in bounded memory, for a report that shows them.
        progress: Called with the number of each step after it was checked.
        follow: Waits for steps of a run that goes on. The verdict is given at the first finding, or when the run ends.
        workers: Number of worker processes on this machine that read the recording, or `"ray"` for those of a Ray
            cluster. The verdict is the same.

    Returns:
        The verdict; `print` it, or see `verdict`, `findings` and `warnings`.

    Raises:
        ConfigError: `steps` or `config` cannot be read, or names a rule or a limit that there is not.
        RecordingError: The recording cannot be used.
        WorkerError: Worker processes died again and again.
    """
    refuse_workers(workers, follow, recording)
    selection = parse_steps(steps, where="check(steps=...)")
    if not isinstance(selection, StepSelection):
        raise ConfigError("check(...)", [selection], consequence=CONSEQUENCE)
    chosen = chosen_rules(rules, skip, config)
    ignored = IgnoredSites(ignore)
    follower = follow or not_following()
    run = open_followed(os.fspath(recording), follower)
    facts = replace(run_facts(run), ignored=tuple(ignored.entries))
    judge = RunJudge(chosen.rules, facts, limits=chosen.limits)
    found = _Found()
    updates = Updates([*facts.optimizers][1:])
    checked: list[int] = []
    missing: dict[int, int] = {}  # by rank: the first step that it did not record
    failed = FailedTaps()
    kept = RunHistory() if history else None
    products = ProductTable() if "products" in run.run["settings"].get("observe", ()) else None
    endings = Endings(run, selection)
    several = False
    for step in _steps(run, judge, workers):
        endings.see(step)
        if step.step not in selection:
            continue
        if not step.finished:
            table = indexed(without_lost(step.table, failed.lost))
            judge.note_contents(table, (), finished=False)
            found.add(judge.step(table, step=step.step, finished=False))
            continue
        checked.append(step.step)
        several = several or bool(step.earlier)
        missing = {**dict.fromkeys([rank for rank in step.missing if rank in run.ranks], step.step), **missing}
        failed.see(step.table, step=step.step)
        recorded = without_lost(step.table, failed.lost)
        ignored.see(recorded)
        if kept is not None:
            kept.note(recorded, step.step)
        table = indexed(
            recorded
            | {entry.key: entry for entry in updates.derive(recorded, step=step.step, optimizer=step.optimizer)[0]}
        )
        judge.note_unknown(table)
        checks = _checks(run, step)
        judge.note_contents(table, checks)
        if products is not None:
            products.add(checks)
        findings_here = judge.step(table, step=step.step, products=checks)
        found.add(findings_here)
        if progress:
            progress(step.step)
        table.clear()
        recorded.clear()
        step.release()
        if follower.is_enough(not all(map(judge.is_warning, ignored.left(findings_here)))):
            break
    all_found = sorted([*found.first_ones(), *judge.end()], key=lambda one: one.step)
    everything = ignored.left(all_found)
    findings = tuple(one for one in everything if not judge.is_warning(one))
    lacking, whole = endings.sentences()
    gaps = [*follower.notes(), *lacking, *failed.notes(), *_missing(run, missing)]
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
            *ignored.notes(),
            *([_LAST_EVALUATION] if several else ()),
            *(f"Not recorded, so not checked: {sentence}" for sentence in unrecorded_of(run)),
            *(f"{reason}." for reason in judge.unknown),
            *judge.notes(),
            *(() if products is None else products.notes()),
        ),
        history=kept,
        products=products,
        rules=judge.asked(everything, ignored.found),
        ignored_sites=ignored.num_sites,
    )


_LAST_EVALUATION = (
    "Some steps evaluate the loss several times (an optimizer with a closure, or sharpness-aware training): rules "
    "judge the last evaluation of each."
)


class _Found:
    """Findings of single steps: each fault once, with its first finding and the number of its steps."""

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


def _steps(run: Recording, judge: RunJudge, workers: Workers) -> Iterator[RunStep]:
    """The steps of a run; before each, the judge learns what the run has found out since."""
    for step in steps_of(run, workers):
        if run.says_more():
            judge.learn(run_facts(run))
        yield step
        del step


def _checks(run: Recording, step: RunStep) -> list[ProductCheck]:
    """The checks of products in a step."""
    if not step.products:
        return []
    return product_checks(step.products, {rank: run.rank_content(rank).get("products", {}) for rank in run.ranks})


def _missing(run: Run, missing: dict[int, int]) -> list[str]:
    """Notes on ranks that are missing, or end earlier than others."""
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


class Endings:
    """Follows each rank to its last step.

    Args:
        run: The run.
        selection: Steps to check.
    """

    def __init__(self, run: Run, selection: StepSelection) -> None:
        self._run = run
        self._selection = selection
        self._last: dict[int, Observation] = {}
        self._finished: dict[int, dict[str, int]] = {}  # the last finished step, by rank and optimizer

    def see(self, step: RunStep) -> None:
        """Note that a step exists, whether it is selected or not."""
        self._last.update(step.last)
        if step.finished:
            for rank in step.last:
                self._finished.setdefault(rank, {})[step.optimizer] = step.step

    def sentences(self) -> tuple[list[str], list[str]]:
        """Sentences about ranks that were killed or aborted: those that lack selected steps, and the others."""
        lacking: list[str] = []
        whole: list[str] = []
        for rank in self._run.ranks:
            status = self._run.status(rank)
            if status.ending != "closed":
                (lacking if self._lacks_steps(rank) else whole).append(f"{status.message} {self._came_to(rank)}")
        return lacking, whole

    def _lacks_steps(self, rank: int) -> bool:
        """True if the rank would have recorded a further selected step."""
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
