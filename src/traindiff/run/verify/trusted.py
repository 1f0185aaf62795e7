"""The trusted training, recorded together with its noise, and the candidate verified against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from traindiff.analyse.compare import Comparison, Pinned, Verification, compare
from traindiff.analyse.compare.explanations import has_batch_statistics
from traindiff.analyse.compare.verification import FailedRun
from traindiff.analyse.rules import run_facts
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.run.verify.failed import RunFailedError, compiler_log, refused
from traindiff.run.verify.pinning import ForcedSteps, pin_down, precisions, why_not_forced, zoom_in
from traindiff.run.verify.recipe import Named, recipe_name
from traindiff.run.verify.request import Pin, VerifyRequest
from traindiff.run.verify.runs import LOGS, OF_BATCHES, REPLICAS, Runs
from traindiff.storage import open_recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """Recordings of a baseline and of its noise.

    Attributes:
        baseline: The baseline.
        noise: Recordings for `traindiff.compare(noise=...)`.
        forced: Steps of the baseline to which candidates can be forced.
    """

    baseline: str
    noise: tuple[str, ...]
    forced: ForcedSteps


def trusted_of(runs: Runs, request: VerifyRequest, recordings: Sequence[str]) -> Trusted:
    """The trusted training whose recordings `runs` have made, the baseline's first."""
    replicas = replicas_of(request.replicas, recordings[0])
    forced = ForcedSteps(runs, request.recipe, setup=request.baseline_setup, replicas=replicas)
    return Trusted(baseline=recordings[0], noise=tuple(recordings[1:]), forced=forced)


def record_trusted(runs: Runs, request: VerifyRequest) -> Trusted:
    """Run the trusted training, a second time unchanged if wanted, and in its replicas.

    Raises:
        ConfigError: The recipe cannot be used, or prepares another training when it is called again.
        RunFailedError: A run fails; see `needed`.
    """
    recorded = record_repeated(runs, request, repeat=request.repeat)
    if request.repeat:
        _refuse_what_does_not_repeat(request.recipe, compare(*recorded), runs.asked_by)
    return with_replicas(runs, request, recorded)


def record_repeated(runs: Runs, request: VerifyRequest, *, repeat: bool) -> list[str]:
    """Run the trusted training, with `repeat` a second time unchanged; return the recordings.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: A run fails; see `needed`.
    """
    names = ["baseline", "repeated"] if repeat else ["baseline"]
    return [runs.run(request.recipe, name, num_steps=request.steps, setup=request.baseline_setup) for name in names]


def with_replicas(runs: Runs, request: VerifyRequest, recorded: Sequence[str]) -> Trusted:
    """Run the replicas of the baseline that `record_repeated` has recorded, not compiled: see `make_replica`.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: A run fails; see `needed`.
    """
    setup = replace(request.baseline_setup, compile=False)
    replicas = [
        runs.run(request.recipe, _name(one), num_steps=request.steps, setup=setup, replica=one)
        for one in replicas_of(request.replicas, recorded[0])
    ]
    return trusted_of(runs, request, [*recorded, *replicas])


@contextmanager
def needed(runs: Runs) -> Iterator[None]:
    """Turn the failure of a run inside, without which nothing can be concluded, into a `ConfigError`."""
    try:
        yield
    except RunFailedError as failed:
        raise refused(failed, runs.asked_by) from (failed.error.__cause__ if failed.error else failed)


def replicas_of(replicas: Sequence[str], baseline: str) -> tuple[str, ...]:
    """The replicas that were asked for; with the default ones, another if the model takes statistics of batches.

    Args:
        replicas: Those that were asked for.
        baseline: The baseline's recording, which names the classes of the modules.
    """
    if tuple(replicas) != REPLICAS or not has_batch_statistics(run_facts(open_recording(baseline)).modules.values()):
        return tuple(replicas)
    return (*REPLICAS, OF_BATCHES)


def names_of_runs(replicas: Sequence[str], *, repeat: bool) -> list[str]:
    """The names of the runs that `record_trusted` makes, or may make."""
    further = [OF_BATCHES] if tuple(replicas) == REPLICAS else []
    return ["baseline", *(["repeated"] if repeat else []), *map(_name, (*replicas, *further))]


def _name(replica: str) -> str:
    return replica.replace(":", "-")


def _refuse_what_does_not_repeat(recipe: Named, comparison: Comparison, asked_by: str) -> None:
    first = comparison.first_divergence
    if first is not None and comparison.verdict == "misaligned":
        problem = Problem(
            where=f"recipe {recipe_name(recipe)}",
            what=f"is not the same training when it is called again. In step {first.step}: {first.message}",
            fix="Prepare model, data and generators from scratch in each call; torch, NumPy and random are seeded.",
        )
        raise ConfigError(asked_by, [problem])


def verify_against(trusted: Trusted, request: VerifyRequest, runs: Runs) -> Verification:
    """Run the candidate, compare it, and pin the fault down.

    Raises:
        ConfigError: The candidate cannot be used. One that fails while it trains is `incomplete`.
    """
    failed: FailedRun | None = None
    path = str(runs.directory / "candidate")
    try:
        runs.run(
            request.candidate, "candidate", num_steps=request.steps, setup=request.setup,
            compiler_logs=request.compiler_logs,
        )  # fmt: skip
    except RunFailedError as error:
        failed = error.run
    comparison = _compared(trusted, path, request, failed)
    step, note = _step_to_pin(comparison, request.pin)
    pinned: list[Pinned] = []
    if step is not None and (why := why_not_forced(request.baseline_setup) or why_not_forced(request.setup)):
        note = f"Step {step} was not run again with forced tensors: {why}"
    elif step is not None:
        note = _pin(trusted, request, runs, step=step, into=pinned)
    zoomed, zoom_note = None, ""
    if request.zoom and pinned:
        zoomed, zoom_note = zoom_in(pinned, request, runs, trusted.forced)
    return Verification(
        comparison=comparison, pinned=tuple(pinned), zoomed=zoomed, zoom_note=zoom_note, pin_note=note,
        sides=request.sides, failed=failed,
        compiler=compiler_log(runs.directory / LOGS / "candidate") if request.compiler_logs else None,
        output=str(runs.directory), costs=tuple(runs.costs), peak_bytes=runs.peak_bytes,
    )  # fmt: skip


def without_baseline(failed: FailedRun, request: VerifyRequest, runs: Runs) -> Verification:
    """The result if the trusted training fails: nothing is known about the candidate, but what failed is."""
    baseline, candidate = (str(runs.directory / name) for name in ("baseline", "candidate"))
    note = f"The run {failed.run} failed. The candidate cannot be judged without it."
    return Verification(
        comparison=_nothing_compared(baseline, candidate, note), sides=request.sides, failed=failed,
        output=str(runs.directory), costs=tuple(runs.costs), peak_bytes=runs.peak_bytes,
    )  # fmt: skip


def _compared(trusted: Trusted, path: str, request: VerifyRequest, failed: FailedRun | None) -> Comparison:
    """The comparison; of a candidate that failed, with what it had recorded by then."""
    try:
        return compare(trusted.baseline, path, noise=trusted.noise, **request.judging)
    except (RecordingError, ConfigError):
        if failed is None:
            raise
    return _nothing_compared(trusted.baseline, path, "The candidate has recorded nothing.")


def _nothing_compared(baseline: str, candidate: str, note: str) -> Comparison:
    return Comparison(
        baseline=baseline, candidate=candidate, verdict="incomplete", calibrated=False, findings=(),
        unaligned=((), ()), steps=(), notes=(note,), differences=(),
    )  # fmt: skip


def _pin(trusted: Trusted, request: VerifyRequest, runs: Runs, *, step: int, into: list[Pinned]) -> str:
    """Run the step again with forced tensors, in each precision; return the reason if that fails."""
    try:
        for precision in precisions(trusted.baseline):
            given = trusted.forced.step(step, precision)
            into.append(pin_down(runs, given, request))
    except ConfigError as error:
        why = error.problems[0]
        return f"Step {step} could not be run again with forced tensors: {why.where} {why.what} {why.fix}"
    except RunFailedError as error:
        failed = error.run
        return f"Step {step} could not be run again with forced tensors: the run {failed.run} failed. {failed.message}"
    return ""


def _step_to_pin(comparison: Comparison, pin: Pin) -> tuple[int | None, str]:
    """The step to run again with forced tensors, or None; with the reason if the user asked for one in vain."""
    first = comparison.first_divergence
    if pin == "never" or not comparison.steps:
        return None, ""
    if first is not None:
        return (first.step if comparison.verdict == "diverged" else None), ""
    if pin != "always" or comparison.verdict not in ("identical", "equivalent"):
        return None, ""
    if comparison.representation:
        message = (
            "Nothing was run again with forced tensors: the candidate represents some otherwise, so the baseline's "
            "values would be wrong in their place."
        )
        return None, message
    return comparison.steps[-1], ""
