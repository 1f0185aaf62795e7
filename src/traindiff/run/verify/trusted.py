"""The trusted training, recorded, with the recordings that measure its noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from traindiff.analyse.compare import Comparison, Pinned, Verification, compare
from traindiff.analyse.compare.verification import FailedRun, SideOfVerification, Sides
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.run.config.setup import Setup
from traindiff.run.verify.failed import RunFailedError, compiler_log, refused
from traindiff.run.verify.pinning import ForcedSteps, pin_down, precisions, why_not_forced, zoom_in
from traindiff.run.verify.recipe import name_of
from traindiff.run.verify.run_recipe import Named
from traindiff.run.verify.runs import LOGS, REPLICAS, Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """A baseline and its noise.

    Attributes:
        recipe: Prepares the training.
        setup: How it was run.
        baseline: Its recording.
        noise: Recordings for `traindiff.compare(noise=...)`.
    """

    recipe: Named
    setup: Setup
    baseline: str
    noise: tuple[str, ...]


def record_trusted(
    runs: Runs, recipe: Named, setup: Setup, *, steps: int, replicas: Sequence[str], repeat: bool
) -> Trusted:
    """Run the trusted training, again as it is, and in its replicas.

    Raises:
        ConfigError: The recipe cannot be used, fails, or does not repeat itself.
    """
    with needed(runs):
        baseline, repeated = record_repeated(runs, recipe, setup, steps=steps, repeat=repeat)
        if repeated:
            refuse_what_does_not_repeat(recipe, compare(baseline, repeated), runs.asked_by)
        return with_replicas(runs, recipe, setup, (baseline, repeated), steps=steps, replicas=replicas)


def record_repeated(runs: Runs, recipe: Named, setup: Setup, *, steps: int, repeat: bool) -> tuple[str, str]:
    """Run the trusted training, and again as it is; gives both recordings, the second empty where it was not wanted.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: A run fails; see `needed`.
    """
    names = ["baseline", *(["repeated"] if repeat else [])]
    found = [runs.run(recipe, name, num_steps=steps, setup=setup) for name in names]
    return found[0], found[1] if repeat else ""


def with_replicas(
    runs: Runs, recipe: Named, setup: Setup, recorded: tuple[str, str], *, steps: int, replicas: Sequence[str]
) -> Trusted:
    """Run the replicas of what `record_repeated` has run.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: A run fails; see `needed`.
    """
    baseline, *noise = (path for path in recorded if path)
    noise += [runs.run(recipe, _name(one), num_steps=steps, setup=setup, replica=one) for one in replicas]
    return Trusted(recipe=recipe, setup=setup, baseline=baseline, noise=tuple(noise))


@contextmanager
def needed(runs: Runs) -> Iterator[None]:
    """Inside it are runs without which nothing can be said: where one fails, that is a `ConfigError`."""
    try:
        yield
    except RunFailedError as failed:
        raise refused(failed, runs.asked_by) from (failed.error.__cause__ if failed.error else failed)


def names_of_runs(replicas: Sequence[str], *, repeat: bool) -> list[str]:
    """What `record_trusted` calls its runs."""
    return ["baseline", *(["repeated"] if repeat else []), *map(_name, replicas)]


def recipe_name(recipe: Named) -> str:
    """What a recipe is called in messages."""
    return recipe if isinstance(recipe, str) else name_of(recipe)


def _name(replica: str) -> str:
    return replica.replace(":", "-")


def refuse_what_does_not_repeat(recipe: Named, comparison: Comparison, asked_by: str) -> None:
    """Raise `ConfigError` where a recipe prepares another training when it is called again."""
    first = comparison.first_divergence
    if first is not None and comparison.verdict == "misaligned":
        problem = Problem(
            where=f"recipe {recipe_name(recipe)}",
            what=f"is not the same training when it is called again. In step {first.step}: {first.message}",
            fix="Prepare model, data and generators from scratch in each call; torch, NumPy and random are seeded.",
        )
        raise ConfigError(asked_by, [problem])


Pin = Literal["divergence", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a candidate.

    Attributes:
        candidate: Prepares the training in question.
        setup: How it is run.
        steps: Batches to train on.
        replicas: How to perturb the baseline of a step that is pinned down.
        pin: When to pin a fault down.
        rename: See `traindiff.compare`.
        rtol: See `traindiff.compare`.
        atol: See `traindiff.compare`.
        compiler_logs: Have torch's compiler say what it does to the candidate.
        zoom: Run the step that is pinned down once more, and record the operators of the module that is wrong.
    """

    candidate: Named
    setup: Setup
    steps: int
    replicas: Sequence[str] = REPLICAS
    pin: Pin = "divergence"
    rename: Mapping[str, str] | Sequence[str] | None = None
    rtol: float | None = None
    atol: float | None = None
    compiler_logs: bool = False
    zoom: bool = False


def verify_against(trusted: Trusted, question: Question, runs: Runs, forced: ForcedSteps) -> Verification:
    """Run the candidate, compare, and pin down.

    Args:
        trusted: The baseline and its noise.
        question: What is asked.
        runs: Where the candidate is run.
        forced: Steps of the baseline that the candidate can be forced to.

    Raises:
        ConfigError: The candidate cannot be used. One that fails while it trains is `incomplete`.
    """
    failed: FailedRun | None = None
    path = str(runs.directory / "candidate")
    try:
        runs.run(
            question.candidate, "candidate", num_steps=question.steps, setup=question.setup,
            compiler_logs=question.compiler_logs,
        )  # fmt: skip
    except RunFailedError as error:
        failed = error.run
    comparison = _compared(trusted, path, question, failed)
    step, note = _step_to_pin(comparison, question.pin)
    pinned: list[Pinned] = []
    if step is not None and (why := why_not_forced(trusted.setup) or why_not_forced(question.setup)):
        step, note = None, f"Step {step} was not run again with forced tensors: {why}"
    if step is not None:
        note = _pin(trusted, question, runs, forced, step=step, into=pinned)
    zoomed, zoom_note = None, ""
    if question.zoom and pinned:
        zoomed, zoom_note = zoom_in(pinned, question, runs, forced)
    return Verification(
        comparison=comparison,
        pinned=tuple(pinned),
        zoomed=zoomed,
        zoom_note=zoom_note,
        pin_note=note,
        sides=sides_of(trusted.recipe, trusted.setup, question),
        failed=failed,
        compiler=compiler_log(runs.directory / LOGS / "candidate") if question.compiler_logs else None,
        output=str(runs.directory),
        costs=tuple(runs.costs),
        peak_bytes=runs.peak_bytes,
    )


def sides_of(recipe: Named, setup: Setup, question: Question) -> Sides:
    """The trusted training and the one in question, as reports name them."""
    return _side(recipe, setup), _side(question.candidate, question.setup)


def _side(recipe: Named, setup: Setup) -> SideOfVerification:
    return SideOfVerification(recipe=recipe_name(recipe), setup=setup.to_json(), message=setup.message)


def _compared(trusted: Trusted, path: str, question: Question, failed: FailedRun | None) -> Comparison:
    """The comparison; where the candidate failed, of what it had recorded by then."""
    try:
        return compare(
            trusted.baseline, path, noise=trusted.noise, rename=question.rename, rtol=question.rtol, atol=question.atol
        )
    except (RecordingError, ConfigError):
        if failed is None:
            raise
    return Comparison(
        baseline=trusted.baseline, candidate=path, verdict="incomplete", calibrated=False, findings=(),
        unaligned=((), ()), steps=(), notes=("The candidate has recorded nothing.",), differences=(),
    )  # fmt: skip


def _pin(
    trusted: Trusted, question: Question, runs: Runs, forced: ForcedSteps, *, step: int, into: list[Pinned]
) -> str:
    """Run the step again with forced tensors, in each precision; gives back why not, or nothing."""
    try:
        for precision in precisions(trusted.baseline):
            given = forced.step(step, precision)
            into.append(pin_down(runs, given, question.candidate, setup=question.setup, rename=question.rename))
    except ConfigError as error:
        why = error.problems[0]
        return f"Step {step} could not be run again with forced tensors: {why.where} {why.what} {why.fix}"
    except RunFailedError as error:
        failed = error.run
        return f"Step {step} could not be run again with forced tensors: the run {failed.run} failed. {failed.message}"
    return ""


def _step_to_pin(comparison: Comparison, pin: Pin) -> tuple[int | None, str]:
    """The step to run again with forced tensors; if none although that was asked for, why."""
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
