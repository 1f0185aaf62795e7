"""`traindiff.investigate`: every question about two trainings that should be the same, in one call."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from traindiff.analyse.compare import Verification, compare
from traindiff.analyse.compare.investigation import Investigation, Stage
from traindiff.analyse.compare.verdict import Word
from traindiff.analyse.compare.verification import FailedRun
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.core.summary import number
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.present.page import page_of
from traindiff.present.page import write as write_page
from traindiff.present.text.results import print_investigation
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.config.setup import baseline_setup as trusted_way
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.verify import investigation_stages as stages
from traindiff.run.verify.determinism import CONTROLS
from traindiff.run.verify.failed import RunFailedError
from traindiff.run.verify.recipe import Named
from traindiff.run.verify.request import VerifyRequest
from traindiff.run.verify.runs import REPLICAS, Progress, Runs
from traindiff.run.verify.trusted import names_of_runs, needed, record_repeated, verify_against, with_replicas
from traindiff.run.verify.verify import INVESTIGATION, REPORT, refuse_others_files, write_text_and_json, write_whole
from traindiff.run.verify.verify import JSON as VERIFICATION
from traindiff.storage import open_recording

OUTPUT = "traindiff-investigate"
"""Default directory of an investigation."""

SEEDS = 2
"""Default number of further seeds of the baseline."""

JSON, HTML = INVESTIGATION, "report.html"

_STEADY = "steady"

OnStage = Callable[[Stage], None]
"""Called with each stage when it is complete."""


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
    map: str | os.PathLike[str] | None = None,  # noqa: A002  as in the commands
    accept: str | os.PathLike[str] | None = None,
    ignore: str | Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    record: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
    on_stage: OnStage | None = None,
) -> Investigation:
    """Ask everything about a training in question, one stage after the other, and stop when a conclusion is final.

    Does the baseline repeat itself? How much does the seed matter? Does the candidate differ by more than noise? Does
    that remain without dropout, with deterministic algorithms, on one thread? Which step is the first that differs,
    which site in it, which modules are wrong alone, and which operator inside the first of them?

    Args:
        recipe: Prepares the trusted training; see `traindiff.verify`.
        candidate: Prepares the training in question; by default `recipe`.
        output: Directory for the recordings and the report; those of an earlier call are replaced.
        setup: Engine, dtype, ... of the candidate.
        baseline_setup: The same for the trusted training; by default plain PyTorch with the same mathematics.
        steps: Batches to train on in each run.
        seed: Seed of torch's, NumPy's and Python's generators.
        seeds: Number of further seeds for the baseline, which show how much its loss depends on the seed.
        replicas: Perturbations of the baseline that measure its noise; see `traindiff.record(replica=...)`.
        rename: See `traindiff.compare`.
        map: See `traindiff.compare`.
        accept: See `traindiff.compare`.
        ignore: See `traindiff.compare`.
        rtol: See `traindiff.compare`.
        atol: See `traindiff.compare`.
        record: Settings of `traindiff.record` for all runs; they override those of the recipes.
        timeout: Seconds that a run in its own processes may go without ending a step; see `traindiff.verify`.
        progress: Called as the runs proceed.
        on_stage: Called with each stage when it is complete.

    Returns:
        The stages with their conclusions, and the verifications behind them.

    Raises:
        ConfigError: A recipe, setup or setting cannot be used, or the baseline fails.
    """
    request = VerifyRequest(
        recipe=recipe, candidate=recipe if candidate is None else candidate, output=Path(output),
        baseline_setup=trusted_way(setup) if baseline_setup is None else baseline_setup, setup=setup, steps=steps,
        seed=seed, replicas=replicas, zoom=True, rename=rename, map=map, accept=accept, ignore=ignore,
        rtol=rtol, atol=atol, record=record or {}, timeout=timeout,
        progress=progress, asked_by="investigate(...)",
    )  # fmt: skip
    ranks = PresentRanks.found()
    work = Investigating(request=request, seeds=seeds, on_stage=on_stage, ranks=ranks)
    return ranks.together(work.run) if ranks else work.run()


@dataclass(slots=True, kw_only=True)
class Investigating:
    """An investigation under way.

    Attributes:
        request: The verification to investigate.
        seeds: Number of further seeds of the baseline.
        on_stage: Called after each stage.
        ranks: Ranks that exist already; this process leads them.
    """

    request: VerifyRequest
    seeds: int = SEEDS
    on_stage: OnStage | None = None
    ranks: PresentRanks | None = None
    _stages: list[Stage] = field(default_factory=list)
    _free: Verification | None = None
    _steady: Verification | None = None
    _failed: RunFailedError | None = None

    def run(self) -> Investigation:
        """Investigate, and leave the report beside the recordings.

        Raises:
            ConfigError: See `investigate`. If the baseline fails, the report says so too.
        """
        request = self.request
        request.check(self.ranks)
        request.refuse_same_training()
        if self.seeds < 0:
            what, fix = "must be a whole number, at least 0.", "Write seeds=2."
            raise ConfigError(request.asked_by, [Problem(where=f"seeds={self.seeds}", what=what, fix=fix)])
        runs = request.runs(request.output, self.ranks)
        refuse_others_files(request.output, (REPORT, HTML), jsons=(JSON, VERIFICATION), asked_by=request.asked_by)
        runs.check(_names(request, self.seeds))
        runs.refuse_unusable(request.candidate, request.setup)
        for stage in self._asked(runs):
            self._stages.append(stage)
            if self.on_stage:
                self.on_stage(stage)
            if stage.final:
                break
        word: Word = "incomplete" if self._failed else "misaligned" if self._free is None else self._free.verdict
        found = Investigation(
            sides=request.sides, stages=tuple(self._stages), free=self._free, steady=self._steady, verdict=word,
            output=str(request.output), costs=tuple(runs.costs), peak_bytes=runs.peak_bytes,
        )  # fmt: skip
        write_files(found, request)
        if self._failed is not None:
            with needed(runs):
                raise self._failed
        return found

    def _asked(self, runs: Runs) -> Iterator[Stage]:
        """Run the stages one after the other. Whoever asks stops after the first that is final."""
        request = self.request
        try:
            recorded = record_repeated(runs, request, repeat=True)
        except RunFailedError as failed:
            self._failed = failed
            yield stages.without_baseline("repeats", failed.run)
            return
        yield stages.repeats(compare(*recorded))
        losses = {request.seed: losses_of(recorded[0])}
        of_seeds = self._seeded(runs, losses)
        yield of_seeds
        try:
            trusted = with_replicas(runs, request, recorded)
        except RunFailedError as failed:
            self._failed = failed
            yield stages.without_baseline("differs", failed.run)
            return
        free = self._free = verify_against(trusted, replace(request, pin="never"), runs)
        both = losses[request.seed], losses_of(free.comparison.candidate)
        yield stages.differs(
            free, both, of_seeds.numbers["spread"], has_tolerance=request.rtol is not None or request.atol is not None
        )  # fmt: skip
        try:
            steady = self._steady = self._controlled(runs, tuple(CONTROLS), pin=True)
        except RunFailedError as failed:
            yield stages.unknown("baseline", failed.run)
            return
        alone: dict[str, str] = {}
        if steady.failed is None and steady.verdict != "diverged":
            alone = {control: self._alone(runs, control) for control in CONTROLS}
        yield stages.remains(steady, alone)
        for stage in (stages.first_step, stages.first_site, stages.pinned, stages.operators):
            yield stage(steady)

    def _seeded(self, runs: Runs, losses: dict[int, dict[int, float]]) -> Stage:
        """Run the baseline with further seeds, and add its losses to `losses`, which is by seed."""
        request = self.request
        failed: dict[int, FailedRun] = {}
        for seed in range(request.seed + 1, request.seed + 1 + self.seeds):
            other = replace(_in(runs, f"seed-{seed}"), seed=seed)
            try:
                losses[seed] = losses_of(*record_repeated(other, request, repeat=False))
            except RunFailedError as error:
                failed[seed] = error.run
            runs.peak_bytes = max(runs.peak_bytes, other.peak_bytes)
        return stages.seeds(losses, failed)

    def _alone(self, runs: Runs, control: str) -> Word:
        """The verdict with one determinism control alone."""
        try:
            return self._controlled(runs, (control,), pin=False).verdict
        except RunFailedError:
            return "incomplete"

    def _controlled(self, runs: Runs, controls: tuple[str, ...], *, pin: bool) -> Verification:
        """Verify both trainings under determinism controls.

        Raises:
            RunFailedError: The baseline fails under them.
        """
        request = replace(self.request, pin="divergence" if pin else "never")
        name = _STEADY if len(controls) > 1 else f"{_STEADY}-{controls[0]}"
        controlled = replace(_in(runs, name), controls=controls)
        trusted = with_replicas(controlled, request, record_repeated(controlled, request, repeat=False))
        found = verify_against(trusted, request, controlled)
        runs.peak_bytes = max(runs.peak_bytes, controlled.peak_bytes)
        return found


def _names(request: VerifyRequest, seeds: int) -> list[str]:
    """The names of all runs that will or may come."""
    controlled = [*names_of_runs(request.replicas, repeat=False), "candidate"]
    return [
        *names_of_runs(request.replicas, repeat=True), "candidate",
        *(f"seed-{seed}/baseline" for seed in range(request.seed + 1, request.seed + 1 + seeds)),
        *(f"{name}/{run}" for name in (_STEADY, *(f"{_STEADY}-{one}" for one in CONTROLS)) for run in controlled),
    ]  # fmt: skip


def _in(runs: Runs, name: str) -> Runs:
    """The same runs in a directory below, with the same list of costs."""
    return replace(runs, directory=runs.directory / name, label=f"{name}/")


def losses_of(recording: str) -> dict[int, float]:
    """The loss of each step of a recording, as `backward` was called on it; empty if the recording cannot be read."""
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


def write_files(found: Investigation, request: VerifyRequest) -> None:
    """Write the stages as text, everything as JSON, and the comparison as a page."""
    write_text_and_json(found, request.output, JSON, print_investigation)
    (request.output / HTML).unlink(missing_ok=True)  # of an earlier investigation
    comparison = found.comparison
    if comparison is not None and comparison.steps:
        noise = [one["path"] for one in (comparison.noise or {}).get("recordings", ())]
        shown = compare(comparison.baseline, comparison.candidate, noise=noise, history=True, **request.judging)
        page = io.StringIO()
        write_page(page_of(shown), page)
        write_whole(request.output / HTML, page.getvalue())
