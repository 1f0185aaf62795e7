"""How ranks ended: what each returned, or why it did not."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from traindiff.core.site import label

BYTES = 512
"""Size of the file. What does not fit is cut off."""


class Seen(Protocol):
    """What is kept of an observation."""

    @property
    def step(self) -> int:
        """See `traindiff.core.observation.Observation`."""

    @property
    def micro_step(self) -> int:
        """See `traindiff.core.observation.Observation`."""

    @property
    def phase(self) -> str:
        """See `traindiff.core.observation.Observation`."""

    @property
    def path(self) -> str:
        """See `traindiff.core.observation.Observation`."""

    @property
    def slot(self) -> str:
        """See `traindiff.core.observation.Observation`."""


class LastSeen:
    """Keeps what was observed last in a file that is mapped into memory.

    The system has the bytes as soon as they are assigned, so they are there however the process ends. One
    observation costs about a microsecond.

    Args:
        path: The file; replaced.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * BYTES)
        self._count = 0
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BYTES)

    def __call__(self, seen: Seen) -> None:
        """Keep this one."""
        self._count += 1
        self._memory[:] = f"{self._count} {seen_text(seen)}".encode()[:BYTES].ljust(BYTES)


def seen_text(seen: Seen) -> str:
    """An observation in a few words."""
    return f"step {seen.step}, micro-step {seen.micro_step}, {seen.phase}, {label(seen.path, seen.slot)}"


def read_last_seen(path: Path) -> tuple[int, str]:
    """How many observations there were, and the last of them in a few words; 0 and nothing where there was none."""
    text = path.read_bytes().decode(errors="replace").strip() if path.exists() else ""
    count, _, last = text.partition(" ")
    return (int(count), last) if last else (0, "")


FIRST_STEP_SECONDS = 600.0
"""Until the first step has ended: imports, building the model, compiling."""

LEAST_SECONDS = 60.0
"""For each step after that, at least."""

FACTOR = 10.0
"""A step may take so many times the slowest one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a rank may go without ending a step.

    Attributes:
        seconds: Always so long; None for what is usual: `FIRST_STEP_SECONDS` for the first step, then `FACTOR` times
            the slowest step, but at least `LEAST_SECONDS`.
    """

    seconds: float | None = None

    def limit(self, slowest_seconds: float | None) -> float:
        """Seconds until a rank is taken to hang.

        Args:
            slowest_seconds: What the slowest step took; None before the first has ended.
        """
        if self.seconds is not None:
            return self.seconds
        return FIRST_STEP_SECONDS if slowest_seconds is None else max(LEAST_SECONDS, FACTOR * slowest_seconds)


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
        message: What happened, a sentence that the rank begins: `raised ValueError: no data.`
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
    message: str = ""
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
        return f"Rank {self.rank} {self.message}"

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
        return (_FIRST.index(end.how), WAITS in end.message, end.num_steps, end.num_observations)
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
