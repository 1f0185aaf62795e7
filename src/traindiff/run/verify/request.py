"""The request of a verification: which trainings, how they are run, and how they are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from traindiff.analyse.compare.verification import SideOfVerification, Sides
from traindiff.analyse.merge.renames import parse_renames
from traindiff.analyse.noise.tolerance import parse_tolerance
from traindiff.core.setting_checks import parse_replica
from traindiff.errors import ConfigError, Problem
from traindiff.run.config.obstacles import obstacles
from traindiff.run.config.setup import PLAIN, Setup, baseline_setup
from traindiff.run.processes.launch import launch
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.processes.rank_end import Patience
from traindiff.run.verify.recipe import Named, recipe_name
from traindiff.run.verify.runs import REPLICAS, Progress, Runs

Pin = Literal["divergence", "always", "never"]


SETUP_OPTIONS = (*(one.name for one in fields(Setup)), "baseline_engine")
"""The options of a setup that a user may give: settings of the candidate's, and the engine of the baseline."""


def setups(options: Mapping[str, Any], *, world_size: int | None) -> tuple[Setup, Setup]:
    """The setups of baseline and candidate, with defaults for options that were left out.

    The baseline is plain PyTorch, or runs under `baseline_engine` on as many ranks as the candidate.

    Args:
        options: Values of `SETUP_OPTIONS`; None for those that were left out.
        world_size: Number of ranks that exist already; None if none do.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    trusted, nproc = given.pop("baseline_engine", "plain"), given.pop("nproc", None)
    of_deepspeed = "zero_stage" in given or "offload_device" in given or given.get("deepcompile")
    engine: Any = given.pop("engine", None) or ("deepspeed" if of_deepspeed else "plain")
    candidate = Setup(engine=engine, nproc=nproc or (1 if engine == "plain" else world_size or 2), **given)
    if trusted == "plain":
        return baseline_setup(candidate), candidate
    baseline = Setup(
        engine=trusted, nproc=candidate.nproc if candidate.nproc > 1 else nproc or 2, dtype=candidate.dtype,
        precision=baseline_setup(candidate).precision if trusted == "ddp" else "autocast",
        gradient_accumulation_steps=candidate.gradient_accumulation_steps,
        gradient_clipping=candidate.gradient_clipping, loss_scale=candidate.loss_scale,
    )  # fmt: skip
    return baseline, candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Everything that a verification is asked: the arguments of `traindiff.verify`, with defaults filled in.

    `asked_by` names the call in messages.
    """

    recipe: Named
    candidate: Named
    output: Path
    baseline_setup: Setup = PLAIN
    setup: Setup = PLAIN
    steps: int = 4
    seed: int = 0
    repeat: bool = True
    replicas: Sequence[str] = REPLICAS
    pin: Pin = "divergence"
    zoom: bool = False
    rename: Mapping[str, str] | Sequence[str] | None = None
    rtol: float | None = None
    atol: float | None = None
    identical: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)
    compiler_logs: bool = False
    timeout: float | None = None
    progress: Progress | None = None
    asked_by: str = "verify(...)"

    @property
    def sides(self) -> Sides:
        """The trusted training and the one in question, as reports name them."""
        return _side(self.recipe, self.baseline_setup), _side(self.candidate, self.setup)

    def runs(self, directory: Path, ranks: PresentRanks | None) -> Runs:
        """Runs that go into a directory, on the ranks that exist already, or else on processes that are started."""
        return Runs(
            directory=directory, seed=self.seed, progress=self.progress, record=self.record, asked_by=self.asked_by,
            patience=Patience(seconds=self.timeout), launcher=ranks.launch if ranks else launch,
        )  # fmt: skip

    def check(self, ranks: PresentRanks | None) -> None:
        """Refuse settings that cannot be used, and setups that cannot be run here.

        Raises:
            ConfigError: Lists all problems.
        """
        problems = [
            found
            for one in self.replicas
            if isinstance(found := parse_replica(one, where=f"replicas, {one!r}"), Problem)
        ]
        if self.pin not in get_args(Pin):
            kind = "a moment to pin a fault down"
            problems.append(Problem.unknown_name(where="pin", kind=kind, found=str(self.pin), known=get_args(Pin)))
        if self.steps < 1:
            what = "must be a whole number, at least 1."
            problems.append(Problem(where=f"steps={self.steps}", what=what, fix="Write steps=4."))
        if self.timeout is not None and not self.timeout > 0:
            what, fix = "must be a number of seconds above 0.", "Write timeout=600, or leave it out."
            problems.append(Problem(where=f"timeout={self.timeout:g}", what=what, fix=fix))
        for setup in (self.baseline_setup, self.setup):
            problems += [found for found in obstacles(setup) if found not in problems]
        if problems:
            raise ConfigError(self.asked_by, problems)
        parse_renames(self.rename)
        parse_tolerance(self.rtol, self.atol)
        if ranks is not None:
            for setup in (self.baseline_setup, self.setup):
                ranks.refuse_other_sizes(setup.nproc, self.asked_by)


def _side(recipe: Named, setup: Setup) -> SideOfVerification:
    return SideOfVerification(recipe=recipe_name(recipe), setup=setup.to_json(), message=setup.message)
