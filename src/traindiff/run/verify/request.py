"""The request of a verification: which trainings, how they are run, and how they are judged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from traindiff.analyse.compare.verification import SideOfVerification, Sides
from traindiff.analyse.merge.renames import parse_renames
from traindiff.analyse.noise.tolerance import parse_tolerance
from traindiff.core.maps.accepted import accepted_of
from traindiff.core.maps.shipped import map_of
from traindiff.core.setting_checks import parse_replica
from traindiff.errors import ConfigError, Problem
from traindiff.run.config.obstacles import obstacles
from traindiff.run.config.options import STEPS
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.processes.launch import launch
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.processes.rank_end import Patience
from traindiff.run.verify.recipe import Named, recipe_name
from traindiff.run.verify.runs import REPLICAS, Progress, Runs

Pin = Literal["divergence", "always", "never"]


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
    steps: int = STEPS
    seed: int = 0
    repeat: bool = True
    replicas: Sequence[str] = REPLICAS
    pin: Pin = "divergence"
    zoom: bool = False
    rename: Mapping[str, str] | Sequence[str] | None = None
    map: str | os.PathLike[str] | None = None
    accept: str | os.PathLike[str] | None = None
    ignore: str | Sequence[str] = ()
    rtol: float | None = None
    atol: float | None = None
    identical: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)
    compiler_logs: bool = False
    timeout: float | None = None
    progress: Progress | None = None
    asked_by: str = "verify(...)"

    @property
    def alignment(self) -> dict[str, Any]:
        """The settings of `compare` that say what belongs together and what is set aside."""
        return {"rename": self.rename, "map": self.map, "accept": self.accept, "ignore": self.ignore}

    @property
    def judging(self) -> dict[str, Any]:
        """The settings of `compare` that say how a free run is judged."""
        return {**self.alignment, "rtol": self.rtol, "atol": self.atol, "identical": self.identical}

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
        map_of(self.map)
        accepted_of(self.accept, self.ignore)
        parse_tolerance(self.rtol, self.atol)
        if ranks is not None:
            for setup in (self.baseline_setup, self.setup):
                ranks.refuse_other_sizes(setup.nproc, self.asked_by)

    def refuse_same_training(self) -> None:
        """Raise `ConfigError` if settings were given with which the candidate is still the baseline's own training.

        Without any setting, a recipe that is verified against itself is asked if it repeats itself.
        """
        given = [name for name in ("rtol", "atol") if getattr(self, name) is not None]
        given = ["setup"] * (self.setup != PLAIN) + given
        if self.recipe != self.candidate or self.setup != self.baseline_setup or not given:
            return
        fix = (
            "Give another recipe (candidate, --candidate), or an engine, e.g. --engine ddp. For what DeepSpeed's "
            "compare_loss.py compares, write --like compare_loss."
        )
        what = (
            f"are given, but baseline and candidate are the same training ({self.setup.message}): dtype, clipping and "
            "loss scale apply to both, and tolerances make no difference."
        )
        raise ConfigError(self.asked_by, [Problem(where=", ".join(given), what=what, fix=fix)])


def _side(recipe: Named, setup: Setup) -> SideOfVerification:
    return SideOfVerification(recipe=recipe_name(recipe), setup=setup.to_json(), message=setup.message)
