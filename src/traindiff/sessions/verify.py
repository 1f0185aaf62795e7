"""`traindiff.verify`: run a trusted training and the one in question, compare them, and pin down what is wrong."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from traindiff.comparison import Comparison, Pinned, RunCost, Verification, compare
from traindiff.errors import ConfigError, Problem
from traindiff.recording import open_recording
from traindiff.replica_setting import parse_replica
from traindiff.sessions.recipe import Recipe
from traindiff.sessions.running import run_recipe

REPLICAS = ("ulp:1", "ulp:2", "reorder:1")
"""Replicas that floors are measured from by default."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a run, its current step, and how many there will be."""

Pin = Literal["divergence", "always", "never"]


@dataclass(slots=True, kw_only=True)
class _Runs:
    """Runs recipes into one directory, and keeps account of it."""

    directory: Path
    seed: int
    progress: Progress | None
    record: Mapping[str, Any]
    asked_by: str
    costs: list[RunCost] = field(default_factory=list)

    def run(self, recipe: Recipe, name: str, *, num_steps: int, **settings: Any) -> str:
        began = time.perf_counter()
        done = [0]

        def on_step(step: int) -> None:
            done[0] = step + 1
            if self.progress:
                self.progress(name, step + 1, num_steps)

        if self.progress:
            self.progress(name, 0, num_steps)
        path = run_recipe(
            recipe, self.directory / name, num_steps=num_steps, seed=self.seed, asked_by=self.asked_by, on_step=on_step,
            overwrite=True, **{**self.record, **settings},
        )  # fmt: skip
        self.costs.append(RunCost(name=name, steps=done[0], seconds=time.perf_counter() - began))
        return path


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
    runs = _runs(output, seed=seed, progress=progress, record={}, asked_by="calibrate(...)", replicas=replicas)
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
    baseline's after it was compared. Errors then neither accumulate nor cancel, and each
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
    runs = _runs(output, seed=seed, progress=progress, record=record or {}, asked_by="verify(...)", replicas=replicas)
    baseline, noise = _calibrate(runs, recipe, steps=steps, replicas=replicas, repeat=repeat)
    run = runs.run(candidate, "candidate", num_steps=steps)
    comparison = compare(baseline, run, noise=noise, rename=rename, rtol=rtol, atol=atol)
    step = _step_to_pin(comparison, pin)
    pinned: list[Pinned] = []
    note = ""
    if step is not None:
        try:
            for precision in _precisions(baseline):
                pinned.append(_pin_down(runs, recipe, candidate, step=step, precision=precision, rename=rename))
        except ConfigError as error:
            note = f"Step {step} could not be run again with forced tensors: {error.problems[0].what}"
    return Verification(
        comparison=comparison,
        pinned=tuple(pinned),
        pin_note=note,
        costs=tuple(runs.costs),
        peak_bytes=_peak_bytes(),
    )


def _runs(
    output: str | os.PathLike[str],
    *,
    seed: int,
    progress: Progress | None,
    record: Mapping[str, Any],
    asked_by: str,
    replicas: Sequence[str],
) -> _Runs:
    problems = [
        found for one in replicas if isinstance(found := parse_replica(one, where=f"replicas, {one!r}"), Problem)
    ]
    if problems:
        raise ConfigError(asked_by, problems)
    return _Runs(directory=Path(output), seed=seed, progress=progress, record=record, asked_by=asked_by)


def _calibrate(
    runs: _Runs, recipe: Recipe, *, steps: int, replicas: Sequence[str], repeat: bool
) -> tuple[str, tuple[str, ...]]:
    baseline = runs.run(recipe, "baseline", num_steps=steps)
    noise = []
    if repeat:
        noise.append(runs.run(recipe, "repeated", num_steps=steps))
        _refuse_what_does_not_repeat(compare(baseline, noise[0]), runs.asked_by)
    noise += [runs.run(recipe, one.replace(":", "-"), num_steps=steps, replica=one) for one in replicas]
    return baseline, tuple(noise)


def _refuse_what_does_not_repeat(comparison: Comparison, asked_by: str) -> None:
    first = comparison.first_divergence
    if first is not None and comparison.verdict == "misaligned":
        problem = Problem(
            where="recipe",
            what=f"is not the same training when it is called again. In step {first.step}: {first.says}",
            fix="Prepare model, data and generators from scratch in the recipe; torch, NumPy and random are seeded.",
        )
        raise ConfigError(asked_by, [problem])


def _step_to_pin(comparison: Comparison, pin: Pin) -> int | None:
    first = comparison.first_divergence
    if pin == "never" or not comparison.steps:
        return None
    if first is not None:
        return first.step if comparison.verdict == "diverged" else None
    return comparison.steps[-1] if pin == "always" and comparison.verdict in ("identical", "equivalent") else None


def _precisions(baseline: str) -> Iterator[torch.dtype | None]:
    """Natively; and in float32 where the training computes in something shorter."""
    yield None
    recording = open_recording(baseline)
    shorter = {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}
    step = next(recording.steps(recording.ranks[0]), None)
    if step is not None and any(seen.dtype in shorter for seen in step.observations):
        yield torch.float32


def _pin_down(
    runs: _Runs,
    recipe: Recipe,
    candidate: Recipe,
    *,
    step: int,
    precision: torch.dtype | None,
    rename: Mapping[str, str] | Sequence[str] | None,
) -> Pinned:
    """Run the step again, forced. The step before comes along: it ends with the state that this one begins with."""
    name = "native" if precision is None else str(precision).removeprefix("torch.")
    directory = f"pinned-step-{step}-{name}"
    common: dict[str, Any] = {"num_steps": step + 1, "precision": precision, "steps": f"{max(0, step - 1)}-{step}"}
    baseline = runs.run(recipe, f"{directory}/baseline", detail="tensors", **common)
    forced = {**common, "forced_by": baseline}
    replicas = REPLICAS if precision is None else [one for one in REPLICAS if one.startswith("ulp")]
    noise = [runs.run(recipe, f"{directory}/{one.replace(':', '-')}", replica=one, **forced) for one in replicas]
    found = runs.run(candidate, f"{directory}/candidate", **forced)
    comparison = compare(baseline, found, noise=noise, rename=rename, steps=str(step))
    return Pinned(step=step, precision=name, comparison=comparison)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
