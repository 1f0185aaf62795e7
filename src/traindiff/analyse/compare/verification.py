"""What `traindiff.verify` says: a comparison of two free runs, and what was pinned down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traindiff.analyse.compare.failed_run import CompilerLog, FailedRun
from traindiff.analyse.compare.verdict import EXIT_CODES, Comparison, Word
from traindiff.analyse.findings import Finding
from traindiff.analyse.story import of_verification

SCHEMA_NAME = "traindiff-verification"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """What one run of a recipe took.

    Attributes:
        name: Its directory.
        num_steps: Steps that were run.
        seconds: Wall time.
    """

    name: str
    num_steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """One step, run again with every tensor forced to the baseline's: each operation is judged alone.

    Attributes:
        step: The step.
        precision: `native`, or the dtype in which both were computed.
        comparison: Its findings are the operations that are wrong by themselves.
    """

    step: int
    precision: str
    comparison: Comparison

    @property
    def where(self) -> str:
        """The step, and how it was computed."""
        return f"step {self.step}, {'in its own dtypes' if self.precision == 'native' else f'in {self.precision}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideOfVerification:
    """What was run on one side.

    Attributes:
        recipe: Its name.
        setup: How it was run, all settings.
        message: The same in a line, what is as by default left out.
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
class Verification:
    """The result of `traindiff.verify`; `str()` of it is the report in the terminal.

    Attributes:
        comparison: Baseline against candidate, each run freely.
        sides: What was run, of the baseline and of the candidate.
        output: Directory of the recordings, of `report.txt` and `verification.json`, and of what ranks printed.
        failed: What happened to a candidate that did not come to its end; None for one that did.
        pinned: The step of the divergence run again, forced; empty where nothing was pinned down.
        pin_note: Why nothing was pinned down although that was asked for; empty otherwise.
        zoomed: The step that was pinned down once more, with the operators of the module that is wrong; None where that
            was not asked for, or not possible.
        zoom_note: Why not, although it was asked for; empty otherwise.
        compiler: What torch's compiler said of the candidate, where that was asked for.
        costs: What each run took, in order.
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
        """The word: the comparison's, or `diverged` if an operation is wrong by itself.

        `incomplete` of a candidate that failed before anything else was wrong.
        """
        word = self.comparison.verdict
        if word in ("identical", "equivalent"):
            if any(one.comparison.findings for one in self.pinned):
                return "diverged"
            return "incomplete" if self.failed else word
        return word

    @property
    def first_divergence(self) -> Finding | None:
        """The first finding of the free runs; where there is none, of the forced ones."""
        firsts = (one.first_divergence for one in (self.comparison, *(pin.comparison for pin in self.pinned)))
        return next((first for first in firsts if first is not None), None)

    @property
    def exit_code(self) -> int:
        """Exit code of `traindiff verify`: 0 identical or equivalent, 1 diverged, 3 otherwise."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        first = self.first_divergence
        return {
            **self.comparison.to_json(),
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "verdict": self.verdict,
            "first_divergence": first.to_json() if first else None,
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
            "costs": [{"name": one.name, "num_steps": one.num_steps, "seconds": one.seconds} for one in self.costs],
            "peak_bytes": self.peak_bytes,
        }

    def __str__(self) -> str:
        return str(of_verification(self))
