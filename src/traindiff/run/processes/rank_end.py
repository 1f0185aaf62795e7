"""The end of a rank: its result, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from traindiff.errors import Problem

FIRST_STEP_SECONDS = 600.0
"""Patience until the end of the first step: imports, building the model, compiling."""

LEAST_SECONDS = 60.0
"""Least patience for each later step."""

FACTOR = 10.0
"""A step may take this many times as long as the slowest step before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a rank may be quiet, as `Clock.quiet` counts it: neither ending a step, nor computing.

    Attributes:
        seconds: The limit for every step. None for the default: `FIRST_STEP_SECONDS` for the first step, then `FACTOR`
            times the slowest step, but at least `LEAST_SECONDS`.
    """

    seconds: float | None = None

    def limit(self, slowest_seconds: float | None) -> float:
        """Quiet seconds after which a rank counts as hanging, given its slowest step (None before its end)."""
        if self.seconds is not None:
            return self.seconds
        return FIRST_STEP_SECONDS if slowest_seconds is None else max(LEAST_SECONDS, FACTOR * slowest_seconds)


How = Literal["returned", "raised", "died", "hung", "stopped"]

WAITS = "waiting for other ranks"
"""Part of the message of a rank that hangs in a collective."""

_FIRST: tuple[How, ...] = ("died", "raised", "hung", "stopped", "returned")
"""Ends in the order in which they explain others: ranks that wait for a dead rank raise, or hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: The rank.
        how: `returned`, `raised` an exception, `died` (a signal, or an exit without a message), `hung`, or `stopped`
            because another rank had failed.
        message: The rest of a sentence that begins with the rank: `raised ValueError: no data.`
        after_seconds: Time since the start.
        num_steps: Steps that the rank had ended.
        num_observations: Observations so far. Among hanging ranks, the one that waits for no other has the fewest.
        last_observation: The last observation, e.g. `step 3, micro-step 0, forward, layers.2 output[0]`.
        stack: The traceback of its exception, or the stacks of all its threads.
        output: The last lines of its output.
        output_file: File with all of its output.
        result: Its return value, as JSON values.
        problems: Those of the `ConfigError` that it raised, if it did.
        explained: True if that `ConfigError` only explains another exception, raised by the function itself.
    """

    rank: int
    how: How
    message: str = ""
    after_seconds: float = 0.0
    num_steps: int = 0
    num_observations: int = 0
    last_observation: str = ""
    stack: str = ""
    output: str = ""
    output_file: str = ""
    result: Any = None
    problems: tuple[Problem, ...] = ()
    explained: bool = False

    @property
    def sentence(self) -> str:
        """The end as a sentence: `Rank 1 raised ValueError: no data.`."""
        return f"Rank {self.rank} {self.message}"


class RanksError(RuntimeError):
    """A rank failed, died or hung.

    Attributes:
        ends: The end of each rank, in the order of ranks.
    """

    def __init__(self, ends: Sequence[RankEnd]) -> None:
        self.ends = tuple(sorted(ends, key=lambda end: end.rank))
        super().__init__("\n".join(_lines(self.ends, self.first)))

    @property
    def first(self) -> RankEnd:
        """The end that explains the others: a rank that died, else the first that raised, else one that hung."""
        return min(self.ends, key=_precedence)


def _precedence(end: RankEnd) -> tuple[float, ...]:
    """Sort key that puts the end that explains the others first."""
    if end.how == "hung":
        return (_FIRST.index(end.how), WAITS in end.message, end.num_steps, end.num_observations)
    return (_FIRST.index(end.how), end.after_seconds)


def _lines(ends: Sequence[RankEnd], first: RankEnd) -> list[str]:
    lines = [f"A function on {len(ends)} {'rank' if len(ends) == 1 else 'ranks'} failed. {first.sentence}"]
    for end in ends:
        lines += ["", end.sentence]
        lines += [f"Its last observation: {end.last_observation}."] if end.last_observation else []
        lines += [end.stack.rstrip()] if end.stack else []
        lines += [f"The end of its output ({end.output_file}):", end.output.rstrip()] if end.output.strip() else []
    return lines
