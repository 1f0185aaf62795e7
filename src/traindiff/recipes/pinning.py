"""Pin a fault down: run one step again with every tensor forced to the baseline's, so that each operation is alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from traindiff.comparison import Pinned, compare
from traindiff.recipes.recorded_run import Named
from traindiff.recipes.runs import REPLICAS, Runs
from traindiff.recording import open_recording
from traindiff.setups.setup import PLAIN, Setup

_SHORTER = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedStep:
    """One step of the trusted training: its tensors, and what its operations make of rounding in them.

    Attributes:
        step: The step.
        precision: Dtype in which everything is computed; None for the training's own.
        baseline: Recording with all tensors, of this step and the one before.
        noise: Recordings of replicas that were forced to these tensors.
        operators: Modules whose operators are recorded.
    """

    step: int
    precision: torch.dtype | None
    baseline: str
    noise: tuple[str, ...]
    operators: str = ""

    @property
    def directory(self) -> str:
        """Where its recordings are."""
        return f"{'zoomed' if self.operators else 'pinned'}-step-{self.step}-{self.name}"

    @property
    def name(self) -> str:
        """How it is computed, e.g. `native` or `float32`."""
        return "native" if self.precision is None else str(self.precision).removeprefix("torch.")

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of each run. The step before comes along: it ends with the state that this one begins with."""
        steps = f"{max(0, self.step - 1)}-{self.step}"
        zoomed = {"operators": self.operators} if self.operators else {}
        return {"num_steps": self.step + 1, "precision": self.precision, "steps": steps, **zoomed}


def why_not_forced(setup: Setup) -> str:
    """Why tensors of a training that is run so cannot be put in place of its own; empty where they can."""
    if setup.compile or setup.deepcompile:
        return "what compiled code computes cannot be replaced on the way. Verify the same without compile."
    if setup.engine == "deepspeed":
        return "DeepSpeed keeps gradients and master weights in flat buffers of its own."
    if setup.engine == "pp":
        return "stages of a pipeline hand on tensors before they could be replaced."
    return ""


def precisions(baseline: str) -> Iterator[torch.dtype | None]:
    """How a step is to be computed again: natively, and in float32 where the training computes in something shorter."""
    yield None
    recording = open_recording(baseline)
    step = next(recording.steps(recording.ranks[0]), None)
    if step is not None and any(seen.dtype in _SHORTER for seen in step.observations):
        yield torch.float32


def precision_named(name: str) -> torch.dtype | None:
    """What `ForcedStep.name` says: None for the training's own dtypes."""
    found: torch.dtype | None = None if name == "native" else getattr(torch, name)
    return found


class ForcedSteps:
    """Steps of a trusted training that candidates can be forced to, each recorded when it is first asked for.

    Args:
        runs: Where, and how.
        recipe: Prepares the trusted training.
        setup: How it is run.
        replicas: How to perturb it; in another dtype those that round are used.

    Attributes:
        setup: How the trusted training is run.
    """

    def __init__(self, runs: Runs, recipe: Named, *, setup: Setup = PLAIN, replicas: Sequence[str] = REPLICAS) -> None:
        self._runs = runs
        self._recipe = recipe
        self.setup = setup
        self._replicas = replicas
        self._recorded: dict[tuple[int, torch.dtype | None, str], ForcedStep] = {}

    def step(self, step: int, precision: torch.dtype | None, *, operators: str = "") -> ForcedStep:
        """What candidates are forced to in a step.

        Args:
            step: The step.
            precision: Compute everything in this dtype; None for the training's own.
            operators: Glob over modules whose operators are recorded; empty for none.

        Raises:
            ConfigError: The recipe cannot be used.
            RunFailedError: The training failed.
        """
        key = (step, precision, operators)
        if key not in self._recorded:
            asked = ForcedStep(step=step, precision=precision, baseline="", noise=(), operators=operators)
            self._recorded[key] = self._record(asked)
        return self._recorded[key]

    def _record(self, plain: ForcedStep) -> ForcedStep:
        directory = plain.directory
        settings = {**plain.settings, "setup": self.setup}
        baseline = self._runs.run(self._recipe, f"{directory}/baseline", detail="tensors", **settings)
        used = [one for one in self._replicas if plain.precision is None or one.startswith("ulp")]
        noise = [
            self._runs.run(
                self._recipe, f"{directory}/{one.replace(':', '-')}", replica=one, forced_by=baseline, **settings
            )
            for one in used
        ]
        return replace(plain, baseline=baseline, noise=tuple(noise))


def pin_down(
    runs: Runs,
    given: ForcedStep,
    candidate: Named,
    *,
    setup: Setup = PLAIN,
    rename: Mapping[str, str] | Sequence[str] | None = None,
    operators: str = "",
) -> Pinned:
    """Run the step of the candidate, with each tensor overwritten by the baseline's after it was observed.

    Errors then neither accumulate nor cancel: what is found is wrong by itself.

    Args:
        runs: Where, and how.
        given: What it is forced to.
        candidate: Prepares the training in question.
        setup: How it is run.
        rename: See `traindiff.compare`.
        operators: What the candidate calls the modules whose operators are recorded.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: The training failed.
    """
    settings = {**given.settings, **({"operators": operators} if operators else {})}
    found = runs.run(candidate, f"{given.directory}/candidate", setup=setup, forced_by=given.baseline, **settings)
    comparison = compare(given.baseline, found, noise=given.noise, rename=rename, steps=str(given.step))
    return Pinned(step=given.step, precision=given.name, comparison=comparison)
