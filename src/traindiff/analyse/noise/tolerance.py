"""Tolerances that the user sets in place of floors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from traindiff.analyse.merge.distance import Pair
from traindiff.core.summary import norm_of
from traindiff.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TolerancesByPhase:
    """Relative tolerances of some phases; floors decide for the other phases.

    NaN and infinities are findings even if both runs have them. For activations, only NaN is a finding, because masks
    are infinite on purpose.
    """

    phases: Mapping[str, float] = field(default_factory=dict)
    non_finite_fails: ClassVar[bool] = True

    @property
    def judges_parameters(self) -> bool:
        """True if parameters are judged after a step, in place of their updates."""
        return "param" in self.phases

    def floor(self, pair: Pair) -> float | None:
        """The tolerance of the pair's phase; None if floors decide."""
        return self.phases.get(pair.baseline.key.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """One tolerance for all sites: `||c - b|| <= rtol ||b|| + atol sqrt(n)`."""

    rtol: float
    atol: float
    non_finite_fails: ClassVar[bool] = False
    judges_parameters: ClassVar[bool] = False  # they follow from the parameters before the step and the update

    def floor(self, pair: Pair) -> float:
        """The tolerance relative to the baseline's norm."""
        size = norm_of(pair.baseline.summary)
        absolute = self.atol * math.sqrt(int(pair.baseline.summary["count"]))
        if not absolute:
            return self.rtol
        return self.rtol + (absolute / size if size else math.inf)


Tolerances = Tolerance | TolerancesByPhase
"""Set by the user, in place of floors."""


def parse_tolerance(rtol: float | None, atol: float | None) -> Tolerance | None:
    """The tolerance that the user set; None if none was set.

    Raises:
        ConfigError: A tolerance is negative or NaN.
    """
    problems = [
        Problem(
            where=f"compare({name}={value!r})",
            what="must be a number from 0 up.",
            fix=f"Write e.g. {name}=1e-5, or leave it out to judge by floors.",
        )
        for name, value in (("rtol", rtol), ("atol", atol))
        if value is not None and not value >= 0
    ]
    if problems:
        raise ConfigError("compare(...)", problems, consequence="nothing was compared")
    return None if rtol is None and atol is None else Tolerance(rtol=rtol or 0.0, atol=atol or 0.0)
