"""`traindiff.investigate`: everything that one would ask of two trainings that should be the same, in one go."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from traindiff.analyse.compare import Verification, compare
from traindiff.analyse.compare.investigation import Investigation, Stage
from traindiff.analyse.compare.verdict import Word
from traindiff.analyse.compare.verification import FailedRun, Sides
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.core.summary import number
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.present.data import write_json
from traindiff.present.page import page_of
from traindiff.present.page import write as write_page
from traindiff.present.text.results import print_investigation
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.config.setup import baseline_setup as trusted_way
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.verify import investigation_stages as stages
from traindiff.run.verify.aids import AIDS
from traindiff.run.verify.asked import Asked
from traindiff.run.verify.failed import RunFailedError
from traindiff.run.verify.pinning import ForcedSteps
from traindiff.run.verify.run_recipe import Named
from traindiff.run.verify.runs import REPLICAS, Progress, Runs
from traindiff.run.verify.trusted import (
    Question,
    Trusted,
    names_of_runs,
    needed,
    record_repeated,
    sides_of,
    verify_against,
    with_replicas,
)
from traindiff.run.verify.verify import INVESTIGATION, REPORT, check_asked, refuse_others_files, write_whole
from traindiff.run.verify.verify import JSON as VERIFICATION
from traindiff.storage import open_recording

OUTPUT = "traindiff-investigate"
"""Directory of an investigation where none is given."""

SEEDS = 2
"""Further seeds that the baseline is run with."""

JSON, HTML = INVESTIGATION, "report.html"

_WIDTH, _ROWS = 200, 50
_STEADY = "steady"

OnStage = Callable[[Stage], None]
"""Called with each stage when it is there."""


def investigate(
    recipe: Named,
    candidate: Named | None = None,
    output: str | os.PathLike[str] = OUTPUT,
    *,
    setup: Setup = PLAIN,
    baseline_setup: Setup | None = None,
    steps: int = 4,
    seed: int = 0,
    seeds: int = SEEDS,
    replicas: Sequence[str] = REPLICAS,
    rename: Mapping[str, str] | Sequence[str] | None = None,
    record: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
    on_stage: OnStage | None = None,
) -> Investigation:
    """Ask everything of a training in question, one stage after the other, and stop where a conclusion is final.

    Does the baseline repeat itself? How much does the seed matter? Does the candidate differ by more than noise? Does
    that remain without dropout, with deterministic algorithms, on one thread? Which step is the first that differs,
    which site in it, which modules are wrong alone, and which operator inside the first of them?

    Args:
        recipe: Prepares the trusted training; see `traindiff.verify`.
        candidate: Prepares the training in question; `recipe` where left out.
        output: Directory for the recordings and the report; those of an earlier call are replaced.
        setup: Under which engine, in which dtype, ... the candidate is run.
        baseline_setup: The same of the trusted training; where left out, what computes the same in plain PyTorch.
        steps: Batches to train on in each run.
        seed: Of torch's, NumPy's and Python's generators.
        seeds: Further seeds with which the baseline is run, to see how much its loss depends on them.
        replicas: How to perturb the baseline to measure its noise; see `traindiff.record(replica=...)`.
        rename: See `traindiff.compare`.
        record: Settings of `traindiff.record` for all runs, over those of the recipes.
        timeout: Seconds that a run in processes of its own may go without ending a step; see `traindiff.verify`.
        progress: Called as the runs proceed.
        on_stage: Called with each stage when it is there.

    Returns:
        The stages with their conclusions, and the verifications behind them.

    Raises:
        ConfigError: A recipe, setup or setting cannot be used, or the baseline fails.
    """
    question = Question(
        candidate=recipe if candidate is None else candidate, setup=setup, steps=steps, replicas=replicas,
        rename=rename, zoom=True,
    )  # fmt: skip
    asked = Asked(
        recipe=recipe, baseline_setup=trusted_way(setup) if baseline_setup is None else baseline_setup,
        question=question, output=Path(output), seed=seed, record=record or {}, timeout=timeout, progress=progress,
        asked_by="investigate(...)",
    )  # fmt: skip
    ranks = PresentRanks.found()
    work = Investigating(asked=asked, seeds=seeds, on_stage=on_stage, ranks=ranks)
    return ranks.together(work.answered) if ranks else work.answered()


@dataclass(slots=True, kw_only=True)
class Investigating:
    """An investigation that is under way.

    Attributes:
        asked: What is asked, as of a verification.
        seeds: Further seeds of the baseline.
        on_stage: Called with each stage when it is there.
        ranks: Those that are there already, of which this process leads.
    """

    asked: Asked
    seeds: int = SEEDS
    on_stage: OnStage | None = None
    ranks: PresentRanks | None = None
    _stages: list[Stage] = field(default_factory=list)
    _free: Verification | None = None
    _steady: Verification | None = None

    @property
    def sides(self) -> Sides:
        """What is run."""
        return sides_of(self.asked.recipe, self.asked.baseline_setup, self.asked.question)

    def answered(self) -> Investigation:
        """Investigate, and leave the report with the recordings.

        Raises:
            ConfigError: See `investigate`.
        """
        asked = self.asked
        check_asked(asked, self.ranks)
        _check_seeds(self.seeds, asked.asked_by)
        runs = asked.runs(asked.output, self.ranks)
        refuse_others_files(asked.output, (REPORT, HTML), jsons=(JSON, VERIFICATION), asked_by=asked.asked_by)
        runs.check(_names(asked, self.seeds))
        runs.refuse_unusable(asked.question.candidate, asked.question.setup)
        word = self._ask(runs)
        found = Investigation(
            sides=self.sides, stages=tuple(self._stages), free=self._free, steady=self._steady, verdict=word,
            output=str(asked.output), costs=tuple(runs.costs), peak_bytes=runs.peak_bytes,
        )  # fmt: skip
        write_files(found, asked)
        return found

    def _ask(self, runs: Runs) -> Word:
        """One stage after the other; gives the verdict."""
        asked, question = self.asked, self.asked.question
        with needed(runs):
            recorded = record_repeated(runs, asked.recipe, asked.baseline_setup, steps=question.steps, repeat=True)
        if self._add(stages.repeats(compare(*recorded, rtol=0.0, atol=0.0), compare(*recorded))):
            return "misaligned"
        losses = {asked.seed: losses_of(recorded[0])}
        of_seeds = self._seeded(runs, losses)
        self._add(of_seeds)
        with needed(runs):
            trusted = with_replicas(
                runs, asked.recipe, asked.baseline_setup, recorded, steps=question.steps, replicas=question.replicas
            )
        free = self._free = _verified(runs, trusted, replace(question, pin="never"))
        both = losses[asked.seed], losses_of(free.comparison.candidate)
        if self._add(stages.differs(free, both, of_seeds.numbers["spread"])):
            return free.verdict
        try:
            steady = self._steady = self._aided(runs, tuple(AIDS), pin=True)
        except RunFailedError as failed:
            self._add(stages.unknown("baseline", failed.run))
            return free.verdict
        alone: dict[str, str] = {}
        if steady.failed is None and steady.verdict != "diverged":
            alone = {aid: self._alone(runs, aid) for aid in AIDS}
        if self._add(stages.remains(steady, alone)):
            return free.verdict
        for stage in (stages.first_step, stages.first_site, stages.pinned, stages.operators):
            if self._add(stage(steady)):
                break
        return free.verdict

    def _add(self, stage: Stage) -> bool:
        """Take note of a stage; gives whether it is the last."""
        self._stages.append(stage)
        if self.on_stage:
            self.on_stage(stage)
        return stage.final

    def _seeded(self, runs: Runs, losses: dict[int, dict[int, float]]) -> Stage:
        """Run the baseline with further seeds, and add its losses to those of the first."""
        asked = self.asked
        failed: dict[int, FailedRun] = {}
        for seed in range(asked.seed + 1, asked.seed + 1 + self.seeds):
            other = replace(_in(runs, f"seed-{seed}"), seed=seed)
            try:
                path = other.run(asked.recipe, "baseline", num_steps=asked.question.steps, setup=asked.baseline_setup)
                losses[seed] = losses_of(path)
            except RunFailedError as error:
                failed[seed] = error.run
            runs.peak_bytes = max(runs.peak_bytes, other.peak_bytes)
        return stages.seeds(losses, failed)

    def _alone(self, runs: Runs, aid: str) -> Word:
        """The verdict with one aid alone."""
        try:
            return self._aided(runs, (aid,), pin=False).verdict
        except RunFailedError:
            return "incomplete"

    def _aided(self, runs: Runs, aids: tuple[str, ...], *, pin: bool) -> Verification:
        """Both trainings without what the aids take out.

        Raises:
            RunFailedError: The baseline fails so.
        """
        asked, question = self.asked, self.asked.question
        aided = replace(_in(runs, _STEADY if len(aids) > 1 else f"{_STEADY}-{aids[0]}"), aids=aids)
        recorded = record_repeated(aided, asked.recipe, asked.baseline_setup, steps=question.steps, repeat=False)
        trusted = with_replicas(
            aided, asked.recipe, asked.baseline_setup, recorded, steps=question.steps, replicas=question.replicas
        )
        found = _verified(aided, trusted, replace(question, pin="divergence" if pin else "never"))
        runs.peak_bytes = max(runs.peak_bytes, aided.peak_bytes)
        return found


def _verified(runs: Runs, trusted: Trusted, question: Question) -> Verification:
    forced = ForcedSteps(runs, trusted.recipe, setup=trusted.setup, replicas=question.replicas)
    return verify_against(trusted, question, runs, forced)


def _names(asked: Asked, seeds: int) -> list[str]:
    """What the runs are called that are known to come, or may."""
    replicas = asked.question.replicas
    aided = [*names_of_runs(replicas, repeat=False), "candidate"]
    return [
        *names_of_runs(replicas, repeat=True), "candidate",
        *(f"seed-{seed}/baseline" for seed in range(asked.seed + 1, asked.seed + 1 + seeds)),
        *(f"{name}/{run}" for name in (_STEADY, *(f"{_STEADY}-{aid}" for aid in AIDS)) for run in aided),
    ]  # fmt: skip


def _in(runs: Runs, name: str) -> Runs:
    """The same in a directory below, with the same account of what each run took."""
    return replace(runs, directory=runs.directory / name, label=f"{name}/")


def _check_seeds(seeds: int, asked_by: str) -> None:
    if seeds < 0:
        problem = Problem(where=f"seeds={seeds}", what="must be a whole number, at least 0.", fix="Write seeds=2.")
        raise ConfigError(asked_by, [problem])


def losses_of(recording: str) -> dict[int, float]:
    """The loss of each step of a recording, as `backward` was called on it; what of it cannot be read is left out."""
    found: dict[int, float] = {}
    try:
        for step in run_steps(open_recording(recording)):
            for key, entry in step.table.items():
                if key.phase == "loss" and key.slot == "backward" and not entry.unobserved:
                    found.setdefault(step.step, number(entry.summary))
            step.release()
    except RecordingError:
        return {}
    return found


def write_files(found: Investigation, asked: Asked) -> None:
    """Write the story as text, everything as JSON, and the comparison as a page.

    Args:
        found: What was found.
        asked: What was asked.
    """
    text, values = io.StringIO(), io.StringIO()
    print_investigation(Console(file=text, width=_WIDTH, highlight=False, emoji=False), found, top=_ROWS)
    write_json(found, values)
    write_whole(asked.output / REPORT, text.getvalue())
    write_whole(asked.output / JSON, values.getvalue())
    (asked.output / HTML).unlink(missing_ok=True)  # of an earlier investigation
    comparison = found.comparison
    if comparison is not None and comparison.steps:
        noise = [one["path"] for one in (comparison.noise or {}).get("recordings", ())]
        shown = compare(
            comparison.baseline, comparison.candidate, noise=noise, rename=asked.question.rename, history=True
        )
        page = io.StringIO()
        write_page(page_of(shown), page)
        write_whole(asked.output / HTML, page.getvalue())
