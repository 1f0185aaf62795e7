"""The result of `traindiff.verify`: a comparison of two free runs, forced runs, and runs that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from traindiff.analyse import next_commands
from traindiff.analyse.compare.verdict import EXIT_CODES, Comparison, Word
from traindiff.analyse.findings import Finding
from traindiff.analyse.story import of_verification
from traindiff.core.shown import Shown

SCHEMA_NAME = "traindiff-verification"

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Cost of one run of a recipe: its directory, its steps, and wall time in seconds."""

    name: str
    num_steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """One step, run again with every tensor forced to the baseline's: each operation is judged alone.

    Attributes:
        step: The step.
        precision: `native`, or the dtype in which both were computed.
        comparison: Its findings are operations that are wrong by themselves.
    """

    step: int
    precision: str
    comparison: Comparison

    @property
    def where(self) -> str:
        """The step, and the precision of the computation."""
        return f"step {self.step}, {'in its own dtypes' if self.precision == 'native' else f'in {self.precision}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideOfVerification:
    """One side of a verification.

    Attributes:
        recipe: Its name.
        setup: All settings of the run.
        message: The same in a line, without defaults.
    """

    recipe: str
    setup: Mapping[str, Any]
    message: str

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {"recipe": self.recipe, "setup": dict(self.setup)}


Sides = tuple[SideOfVerification, SideOfVerification]
"""Baseline and candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLog:
    """Messages of torch's compiler about a run, over all its ranks.

    Attributes:
        graph_breaks: Why graphs were broken, one entry each, in the compiler's words.
        recompiles: Why it compiled again.
        num_guards: Number of conditions for using the compiled code.
        file: File with the whole log.
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
"""Lines of a stack that are shown; the JSON has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """How one rank of a failed run ended.

    Attributes:
        rank: The rank.
        how: `returned`, `raised`, `died`, `hung`, or `stopped` because another rank had failed.
        message: What happened, a sentence with the rank in it.
        num_steps: Number of finished steps.
        last_observation: Its last observation; empty if there is none.
        stack: Its stack.
        output: The last lines of its output.
        output_file: File with its whole output; empty if the run was in the same process.
    """

    rank: int
    how: str
    message: str
    num_steps: int
    last_observation: str = ""
    stack: str = ""
    output: str = ""
    output_file: str = ""

    @property
    def seen(self) -> str:
        """A sentence about its last observation; empty if there is none."""
        return f" Its last observation: {self.last_observation}." if self.last_observation else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that failed.

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
        """One or two sentences about the failure."""
        first = next(rank for rank in self.ranks if rank.rank == self.first)
        count = first.num_steps
        steps = "no step" if not count else f"{count} {'step' if count == 1 else 'steps'}"
        return f"{_sentence(first.message)} Before that it had ended {steps}.{first.seen}"

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: all about the rank that explains the others, one line about each other rank."""
        yield f"The run {self.run} failed. {self.message}"
        for rank in sorted(self.ranks, key=lambda one: one.rank != self.first):
            if rank.rank != self.first:
                yield from ("", f"{_sentence(rank.message)}{rank.seen}")
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


def _indented(stack: str, rank: int) -> Iterator[str]:
    lines = stack.rstrip().splitlines()
    if not lines:
        return
    yield f"  Where rank {rank} was:"
    if len(lines) > _STACK_LINES:  # the innermost call ends a traceback, and begins a dumped stack
        lines = ["...", *lines[-_STACK_LINES:]] if lines[0].startswith("Traceback") else [*lines[:_STACK_LINES], "..."]
    yield from (f"    {line}" for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Shown):
    """The result of `traindiff.verify`; `str()` of it is the report in the terminal.

    Attributes:
        comparison: Baseline against candidate, each run freely.
        sides: Baseline and candidate.
        output: Directory of the recordings, of `report.txt` and `verification.json`, and of the ranks' output.
        failed: The candidate or a run of the baseline, if it failed; None if all ended.
        pinned: The step of the divergence, run again with forced tensors; empty if nothing was pinned down.
        pin_note: Why nothing was pinned down although that was requested; empty otherwise.
        zoomed: The pinned step once more, with the operators of the wrong module; None if not requested, or not
            possible.
        zoom_note: Why not, although it was requested; empty otherwise.
        compiler: Messages of torch's compiler about the candidate, if requested.
        costs: Cost of each run, in order.
        peak_bytes: Largest resident memory of the processes of a run together.
    """

    comparison: Comparison
    sides: Sides
    output: str
    failed: FailedRun | None = None
    pinned: tuple[Pinned, ...] = ()
    pin_note: str = ""
    zoomed: Pinned | None = None
    zoom_note: str = ""
    compiler: CompilerLog | None = None
    costs: tuple[RunCost, ...] = ()
    peak_bytes: int = 0

    @property
    def verdict(self) -> Word:
        """The comparison's word, or `diverged` if an operation is wrong by itself.

        `incomplete` if a run failed before anything else was wrong.
        """
        word = self.comparison.verdict
        if word in ("identical", "equivalent"):
            if any(one.comparison.findings for one in self.pinned):
                return "diverged"
            return "incomplete" if self.failed else word
        return word

    @property
    def first_divergence(self) -> Finding | None:
        """The first finding of the free runs; if there is none, of the forced ones."""
        firsts = (one.first_divergence for one in (self.comparison, *(pin.comparison for pin in self.pinned)))
        return next((first for first in firsts if first is not None), None)

    @property
    def exit_code(self) -> int:
        """Exit code of `traindiff verify`: 0 identical or equivalent, 1 diverged, 3 otherwise."""
        return EXIT_CODES[self.verdict]

    def commands(self) -> next_commands.Commands:
        """The commands that would tell more: those of the free runs, and of what is wrong by itself."""
        compared = self.comparison
        pinned = [finding.kind for one in self.pinned for finding in one.comparison.findings]
        free = next_commands.of_comparison(
            compared.baseline, compared.candidate, findings=compared.findings, word=compared.verdict,
            calibrated=compared.calibrated,
        )  # fmt: skip
        return [*free, *(one for one in next_commands.explaining(pinned) if one not in free)]

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        first = self.first_divergence
        return {
            **self.comparison.to_json(),
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "verdict": self.verdict,
            "first_divergence": first.to_json() if first else None,
            "next": self.commands(),
            "sides": [side.to_json() for side in self.sides],
            "output": self.output,
            "failed": self.failed.to_json() if self.failed else None,
            "pinned": [
                {"step": one.step, "precision": one.precision, "comparison": one.comparison.to_json()}
                for one in self.pinned
            ],
            "pin_note": self.pin_note,
            "zoomed": [zoom.to_json() for zoom in self.zoomed.comparison.zooms] if self.zoomed else None,
            "zoom_note": self.zoom_note,
            "compiler": self.compiler.to_json() if self.compiler else None,
            "costs": [asdict(one) for one in self.costs],
            "peak_bytes": self.peak_bytes,
        }

    def __str__(self) -> str:
        return str(of_verification(self))
