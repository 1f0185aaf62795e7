"""A run that did not come to its end: what happened on which rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLog:
    """What torch's compiler said of a run, over all its ranks.

    Attributes:
        graph_breaks: Why graphs were broken, one entry each, as the compiler says it.
        recompiles: What made it compile again.
        num_guards: Conditions under which what it compiled may be used.
        file: All of it.
    """

    graph_breaks: tuple[str, ...]
    recompiles: tuple[str, ...]
    num_guards: int
    file: str

    @property
    def message(self) -> str:
        """The counts, in a line."""
        breaks, again = len(self.graph_breaks), len(self.recompiles)
        return (
            f"Compiler: {breaks} graph {'break' if breaks == 1 else 'breaks'}, {again} "
            f"{'recompilation' if again == 1 else 'recompilations'}, {self.num_guards} guards; see {self.file}."
        )

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {
            "graph_breaks": list(self.graph_breaks),
            "recompiles": list(self.recompiles),
            "num_guards": self.num_guards,
            "file": self.file,
        }


_STACK_LINES = 14
"""Of a stack, so many lines are shown; all of them are in the JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """How one rank of a failed run ended.

    Attributes:
        rank: The rank.
        how: `returned`, `raised`, `died`, `hung`, or `stopped` because another rank had failed.
        message: What happened, a sentence with the rank in it.
        num_steps: Steps that it had ended.
        last_observation: What it observed last; empty where nothing.
        stack: Where it was.
        output: The last lines of what it printed.
        output_file: The file that has all of it; empty where the run was in the same process.
    """

    rank: int
    how: str
    message: str
    num_steps: int
    last_observation: str = ""
    stack: str = ""
    output: str = ""
    output_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that did not come to its end.

    Attributes:
        run: Its name, e.g. `candidate`.
        first: The rank whose end explains the others.
        ranks: All ranks, in order.
    """

    run: str
    first: int
    ranks: tuple[FailedRank, ...]

    @property
    def message(self) -> str:
        """What happened, in a sentence or two."""
        first = next(rank for rank in self.ranks if rank.rank == self.first)
        seen = f" Its last observation: {first.last_observation}." if first.last_observation else ""
        return f"{_sentence(first.message)} Before that it had ended {_steps(first.num_steps)}.{seen}"

    def lines(self) -> Iterator[str]:
        """What is shown in a terminal: the rank that explains the others in full, these in a line each."""
        yield f"The run {self.run} failed. {self.message}"
        for rank in sorted(self.ranks, key=lambda one: one.rank != self.first):
            if rank.rank != self.first:
                seen = f" Its last observation: {rank.last_observation}." if rank.last_observation else ""
                yield ""
                yield f"{_sentence(rank.message)}{seen}"
            yield from _indented(rank.stack, rank.rank)
            if rank.rank == self.first and rank.output.strip():
                yield f"  The end of what it printed ({rank.output_file}):"
                yield from (f"    {line}" for line in rank.output.rstrip().splitlines())

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {
            "run": self.run,
            "message": self.message,
            "first": self.first,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


def _sentence(message: str) -> str:
    return message if message.endswith((".", "!", "?")) else f"{message}."


def _steps(count: int) -> str:
    return "no step" if not count else f"{count} {'step' if count == 1 else 'steps'}"


def _indented(stack: str, rank: int) -> Iterator[str]:
    lines = stack.rstrip().splitlines()
    if not lines:
        return
    yield f"  Where rank {rank} was:"
    if len(lines) > _STACK_LINES:  # the innermost call is the last of a traceback, and the first of a dumped stack
        lines = ["...", *lines[-_STACK_LINES:]] if lines[0].startswith("Traceback") else [*lines[:_STACK_LINES], "..."]
    yield from (f"    {line}" for line in lines)
