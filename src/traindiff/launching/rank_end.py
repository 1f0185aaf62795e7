"""How ranks ended: what each returned, or why it did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

How = Literal["returned", "raised", "died", "hung", "stopped"]

WAITS = "waiting for other ranks"
"""In the sentence of a rank that hangs in a collective."""

_FIRST: tuple[How, ...] = ("died", "raised", "hung", "stopped", "returned")
"""Which end explains the others: what waits for a rank that died raises, or hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: The rank.
        how: `returned`, `raised` an exception, `died` (a signal, or an exit without a word), `hung`, or was `stopped`
            because another rank had failed.
        says: What happened, a sentence that the rank begins: `raised ValueError: no data.`
        after_seconds: When, counted from the start.
        num_steps: Steps that it had ended.
        num_observations: What it had observed: of ranks that hang, the one that waits for none has the fewest.
        last_observation: What it observed last, e.g. `step 3, micro-step 0, forward, layers.2 output[0]`.
        stack: Where it was: the traceback of what it raised, or the stacks of all its threads.
        output: The last lines of what it printed.
        output_file: The file that has all of it.
        result: What it returned, as JSON values.
        problems: Of a `ConfigError` that it raised: `where`, `what` and `fix` of each.
        explained: Whether that only explains another exception, one of the function's own.
    """

    rank: int
    how: How
    says: str = ""
    after_seconds: float = 0.0
    num_steps: int = 0
    num_observations: int = 0
    last_observation: str = ""
    stack: str = ""
    output: str = ""
    output_file: str = ""
    result: Any = None
    problems: tuple[Mapping[str, str], ...] = ()
    explained: bool = False

    @property
    def sentence(self) -> str:
        """What happened, a sentence: `Rank 1 raised ValueError: no data.`."""
        return f"Rank {self.rank} {self.says}"

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """What `to_json` made."""
        return cls(**{**content, "problems": tuple(content["problems"])})


class RanksError(RuntimeError):
    """A rank failed, died or hung.

    Args:
        ends: How each rank ended.

    Attributes:
        ends: How each rank ended, in the order of ranks.
    """

    def __init__(self, ends: Sequence[RankEnd]) -> None:
        self.ends = tuple(sorted(ends, key=lambda end: end.rank))
        super().__init__("\n".join(_lines(self.ends)))

    @property
    def first(self) -> RankEnd:
        """The end that explains the others."""
        return first_failure(self.ends)


def first_failure(ends: Sequence[RankEnd]) -> RankEnd:
    """The end that explains the others: of a rank that died, else the first that raised, else one that hung."""
    return min(ends, key=lambda end: _precedence(end))


def _precedence(end: RankEnd) -> tuple[float, ...]:
    """Ends sort by this: the one that explains the others comes first."""
    if end.how == "hung":
        return (_FIRST.index(end.how), WAITS in end.says, end.num_steps, end.num_observations)
    return (_FIRST.index(end.how), end.after_seconds)


def _lines(ends: Sequence[RankEnd]) -> list[str]:
    first = first_failure(ends)
    lines = [f"A function on {len(ends)} {'rank' if len(ends) == 1 else 'ranks'} failed. {first.sentence}"]
    for end in ends:
        lines += ["", end.sentence]
        lines += [f"Its last observation: {end.last_observation}."] if end.last_observation else []
        lines += [end.stack.rstrip()] if end.stack else []
        lines += [f"The end of its output ({end.output_file}):", end.output.rstrip()] if end.output.strip() else []
    return lines
