"""What a rule is, and what it may know of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.parameters import Groups, parameter_groups
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.storage import Run

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class _Row(Generic[V]):
    value: V
    first: int
    num_steps: int = 0


class InARow(Generic[K, V]):
    """Keeps what holds in at least so many steps in a row. Steps that are not shown to it are passed over.

    Args:
        least: Steps in a row from which it is kept.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._running: dict[K, _Row[V]] = {}
        self._kept: dict[K, _Row[V]] = {}

    def see(self, found: Mapping[K, V], *, step: int) -> None:
        """Take note of a step, with the numbers of what holds in it."""
        for key in self._running.keys() - found.keys():
            del self._running[key]
        for key, value in found.items():
            row = self._running.setdefault(key, _Row(value=value, first=step))
            row.num_steps += 1
            if row.num_steps >= self._least:
                self._kept.setdefault(key, row)

    def __iter__(self) -> Iterator[tuple[K, V, int, int]]:
        """What was kept: what it is, its numbers in the first step, that step, and for how many it held."""
        return ((key, row.value, row.first, row.num_steps) for key, row in self._kept.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What does not change during a run.

    Attributes:
        complete: Whether all parameters of one optimizer were recorded, on all ranks.
        modules: Class name of each module by path.
        tied: Path of a parameter by each of its further names.
        trainable: Paths of the parameters that require a gradient.
        held_in: Paths of the groups of recorded optimizers that hold a parameter (`optimizer.groups[0]`), by its path.
    """

    complete: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()
    held_in: Mapping[str, frozenset[str]] = field(default_factory=dict)


def run_facts(recording: Run, rename: Rename = str) -> RunFacts:
    """What does not change during a run.

    Args:
        recording: The run.
        rename: Turns its paths into those that the run's tables have.
    """
    contents = [recording.rank_content(rank) for rank in recording.ranks]
    everything = recording.run["settings"].get("select", ["*"]) == ["*"] and not recording.missing_ranks
    one_optimizer = all(len(content.get("optimizers", ())) == 1 for content in contents)
    return RunFacts(
        complete=everything and one_optimizer and bool(contents),
        modules={rename(path): name for one in contents for path, name in one.get("modules", {}).items()},
        tied={rename(other): rename(path) for one in contents for other, path in one.get("tied", {}).items()},
        trainable=frozenset(
            rename(path)
            for one in contents
            for path, about in one.get("parameters", {}).items()
            if about.get("requires_grad")
        ),
        held_in=_held_in(parameter_groups(recording, rename)),
    )


def _held_in(groups: Groups) -> dict[str, frozenset[str]]:
    """Paths of the groups that hold a parameter, by its path."""
    found: dict[str, frozenset[str]] = {}
    for name, parameters in groups.items():
        for number, paths in enumerate(parameters):
            for path in paths:
                found[path] = found.get(path, frozenset()) | {f"{name}.groups[{number}]"}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A number that a rule holds a run against.

    Attributes:
        default: What it is where the user sets nothing.
        message: What it is, in which unit, and why this much: a phrase that follows its name.
    """

    default: float
    message: str


class Rule:
    """Something that a run must keep by itself. One object judges one run, step by step, in order.

    A rule overrides what it needs: most need `step` only. Sentences begin with a capital letter.

    Args:
        facts: What is known of the run.
        strictness: Divides the rule's limits: 2 finds what is half as large.
        limits: What the user sets in place of the defaults, by name.
    """

    name: ClassVar[str]
    """What users choose it by."""

    finds: ClassVar[str]
    """What it finds: a sentence."""

    kinds: ClassVar[tuple[str, ...]]
    """Kinds of its findings (docs/findings.md)."""

    limits: ClassVar[Mapping[str, Limit]] = {}
    """What users can set, by name."""

    warns: ClassVar[bool] = False
    """Whether what it finds is a warning: worth knowing, and no reason to call a run unhealthy."""

    judges_unfinished: ClassVar[bool] = False
    """Whether it is also given the last step of a run, where that ended before the optimizer was called."""

    tells_runs_apart = True
    """Whether `traindiff compare` asks it too. No for what a comparison finds by itself, and better."""

    def __init__(self, facts: RunFacts, *, strictness: float = 1.0, limits: Mapping[str, float] | None = None) -> None:
        self.facts = facts
        self.strictness = strictness
        self._chosen = limits or {}
        self.begin()

    def begin(self) -> None:
        """Make what the rule keeps from step to step: little, and not more with every step."""

    def limit(self, name: str) -> float:
        """One of `limits`, as the user or the rule sets it."""
        return self._chosen.get(name, self.limits[name].default)

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterable[Finding]:  # noqa: ARG002
        """What is wrong in a step.

        Args:
            table: What the run has of it; empty again when the next step begins, so nothing of it may be kept.
            step: Its number.
        """
        return ()

    def unknown(self, table: Mapping[Key, Entry]) -> Iterable[str]:  # noqa: ARG002
        """Why the rule cannot judge something of a step: sentences that hold for the whole run."""
        return ()

    def end(self) -> Iterable[Finding]:
        """What can be told only now that the run is over."""
        return ()

    def notes(self) -> Iterable[str]:
        """What is worth knowing of a run that is over, and may be meant: sentences."""
        return ()
