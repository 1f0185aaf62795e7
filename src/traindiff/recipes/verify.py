"""`traindiff.verify`: run a trusted training and the one in question, compare them, and pin down what is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from traindiff.comparison import Comparison, Pinned, Verification, compare
from traindiff.errors import ConfigError, Problem
from traindiff.floors.tolerance import parse_tolerance
from traindiff.merging.renames import parse_renames
from traindiff.recipes.pinning import forced_step, pin_down, precisions
from traindiff.recipes.recipe import Recipe, name_of, prepared, undisturbed_random_state
from traindiff.recipes.runs import REPLICAS, Progress, Runs
from traindiff.replica_setting import parse_replica

Pin = Literal["divergence", "always", "never"]


def calibrate(
    recipe: Recipe,
    output: str | os.PathLike[str],
    *,
    steps: int = 4,
    seed: int = 0,
    replicas: Sequence[str] = REPLICAS,
    repeat: bool = True,
    progress: Progress | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Record a training and the runs that measure its noise.

    Args:
        recipe: Prepares the training; called once per run.
        output: Directory for the recordings.
        steps: Batches to train on in each run.
        seed: Of torch's, NumPy's and Python's generators.
        replicas: How to perturb it; see `traindiff.record(replica=...)`.
        repeat: Also run it again as it is: what that differs by is the machine's own noise.
        progress: Called as the runs proceed.

    Returns:
        The baseline's recording, and the recordings for `traindiff.compare(noise=...)`.

    Raises:
        ConfigError: The recipe cannot be used, or does not repeat itself.
    """
    asked_by = "calibrate(...)"
    _check(asked_by, steps=steps, replicas=replicas)
    runs = Runs(directory=Path(output), seed=seed, progress=progress, asked_by=asked_by)
    runs.check(("baseline", *_noise_names(replicas, repeat=repeat)))
    return _calibrate(runs, recipe, steps=steps, replicas=replicas, repeat=repeat)


def verify(
    recipe: Recipe,
    candidate: Recipe,
    output: str | os.PathLike[str],
    *,
    steps: int = 4,
    seed: int = 0,
    replicas: Sequence[str] = REPLICAS,
    repeat: bool = True,
    pin: Pin = "divergence",
    rename: Mapping[str, str] | Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    record: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run a trusted training and the one in question, compare them against measured noise, and pin down the fault.

    Where they diverge, the step is run again with every tensor of the candidate overwritten by the
    baseline's after it was recorded. Errors then neither accumulate nor cancel, and each
    operation is judged alone: natively, and where the training computes in a shorter dtype also
    in float32, in which smaller errors show.

    Args:
        recipe: Prepares the trusted training; called once per run, so it must be the same each time.
        candidate: Prepares the training in question.
        output: Directory for the recordings; those of an earlier call are replaced.
        steps: Batches to train on in each run.
        seed: Of torch's, NumPy's and Python's generators.
        replicas: How to perturb the baseline to measure its noise; see `traindiff.record(replica=...)`.
        repeat: Also run the baseline again as it is, and say first if it does not repeat itself.
        pin: Pin the fault down on `divergence`, `always` (then in the last step if the runs do not
            diverge), or `never`.
        rename: See `traindiff.compare`.
        rtol: See `traindiff.compare`.
        atol: See `traindiff.compare`.
        record: Settings of `traindiff.record` for all runs, over those of the recipes.
        progress: Called as the runs proceed.

    Returns:
        The comparison, what was pinned down, and what it cost.

    Raises:
        ConfigError: A recipe cannot be used, the baseline does not repeat itself, or a setting is wrong.
    """
    asked_by = "verify(...)"
    _check(asked_by, steps=steps, replicas=replicas, pin=pin)
    parse_renames(rename)
    parse_tolerance(rtol, atol)
    with undisturbed_random_state():  # what cannot be used is said now, not after all runs of the baseline
        prepared(candidate, seed=seed, asked_by=asked_by)
    runs = Runs(directory=Path(output), seed=seed, progress=progress, record=record or {}, asked_by=asked_by)
    runs.check(("baseline", *_noise_names(replicas, repeat=repeat), "candidate"))
    baseline, noise = _calibrate(runs, recipe, steps=steps, replicas=replicas, repeat=repeat)
    run = runs.run(candidate, "candidate", num_steps=steps)
    comparison = compare(baseline, run, noise=noise, rename=rename, rtol=rtol, atol=atol)
    step, note = _step_to_pin(comparison, pin)
    pinned: list[Pinned] = []
    if step is not None:
        try:
            pinned.extend(
                pin_down(
                    runs,
                    forced_step(runs, recipe, step=step, precision=precision, replicas=replicas),
                    candidate,
                    rename=rename,
                )
                for precision in precisions(baseline)
            )
        except ConfigError as error:
            why = error.problems[0]
            note = f"Step {step} could not be run again with forced tensors: {why.where} {why.what} {why.fix}"
    return Verification(
        comparison=comparison,
        pinned=tuple(pinned),
        pin_note=note,
        costs=tuple(runs.costs),
        peak_bytes=_peak_bytes(),
    )


def _check(asked_by: str, *, steps: int, replicas: Sequence[str], pin: str = "never") -> None:
    problems = [
        found for one in replicas if isinstance(found := parse_replica(one, where=f"replicas, {one!r}"), Problem)
    ]
    if pin not in get_args(Pin):
        kind = "a moment to pin a fault down"
        problems.append(Problem.unknown_name(where="pin", kind=kind, found=str(pin), known=get_args(Pin)))
    if steps < 1:
        problems.append(
            Problem(where=f"steps={steps}", what="must be a whole number, at least 1.", fix="Write steps=4.")
        )
    if problems:
        raise ConfigError(asked_by, problems)


def _calibrate(
    runs: Runs, recipe: Recipe, *, steps: int, replicas: Sequence[str], repeat: bool
) -> tuple[str, tuple[str, ...]]:
    baseline = runs.run(recipe, "baseline", num_steps=steps)
    noise = []
    if repeat:
        noise.append(runs.run(recipe, "repeated", num_steps=steps))
        _refuse_what_does_not_repeat(recipe, compare(baseline, noise[0]), runs.asked_by)
    noise += [runs.run(recipe, _name(one), num_steps=steps, replica=one) for one in replicas]
    return baseline, tuple(noise)


def _noise_names(replicas: Sequence[str], *, repeat: bool) -> list[str]:
    return [*(["repeated"] if repeat else []), *map(_name, replicas)]


def _name(replica: str) -> str:
    return replica.replace(":", "-")


def _refuse_what_does_not_repeat(recipe: Recipe, comparison: Comparison, asked_by: str) -> None:
    first = comparison.first_divergence
    if first is not None and comparison.verdict == "misaligned":
        problem = Problem(
            where=f"recipe {name_of(recipe)}",
            what=f"is not the same training when it is called again. In step {first.step}: {first.says}",
            fix="Prepare model, data and generators from scratch in each call; torch, NumPy and random are seeded.",
        )
        raise ConfigError(asked_by, [problem])


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
        says = (
            "Nothing was run again with forced tensors: the candidate represents some otherwise, so the baseline's "
            "values would be wrong in their place."
        )
        return None, says
    return comparison.steps[-1], ""


def _peak_bytes() -> int:
    """Largest resident memory of this process so far; 0 where the system does not tell."""
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0
