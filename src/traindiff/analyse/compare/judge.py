"""Judge the steps of two runs one after the other: by noise floors, and each run by the rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from traindiff.analyse.align import exact
from traindiff.analyse.align.two_runs import RUNS
from traindiff.analyse.compare.step_judge import Judged, StepInput, StepJudge
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair, size_of
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.merge.site import SiteKey, StepTable, finding_at
from traindiff.analyse.noise.site_floors import RunFloors, SiteFloors
from traindiff.analyse.noise.tolerance import Tolerances
from traindiff.analyse.rules import RULES, RunFacts
from traindiff.analyse.rules.rule import RunJudge
from traindiff.core.observation import RECOMPUTED
from traindiff.core.summary import rounding

LOGGED = "logged"
"""Slot of the numbers that a training reports."""

FOLLOWS = 0.05
"""If all gradients together differ by more than this part of the activations' difference, they may follow from it."""


class Judge:
    """Judges the steps of two runs, in order, and keeps what later floors depend on.

    Args:
        tolerance: Set by the user, in place of floors.
        forced: Whether the candidate was given the baseline's tensors after each operation.
        coefficients: Relative error that the optimizers' own coefficients may have.
        history: Records every difference, if a report is to show them.

    Attributes:
        judged: Results of the steps so far.
    """

    def __init__(
        self,
        tolerance: Tolerances | None,
        *,
        forced: bool = False,
        coefficients: float = 0.0,
        history: DifferenceHistory | None = None,
    ) -> None:
        self.judged = Judged(tolerance=tolerance, history=history)
        self._forced = forced
        self._found: dict[tuple[SiteKey, str], Finding] = {}
        self._run = RunFloors(coefficients=coefficients)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, in execution order: each site once, with its number of steps."""
        return tuple(self._found.values())

    @property
    def only_representation_differs(self) -> bool:
        """Whether activations, or the order of samples or channels, differ, but no loss, gradient or update."""
        phases = {row.phase for row in self.judged.differences.values()}
        learning = bool({"loss", "grad", "update"} - phases) or self._run.learning_differs
        if not self._found or learning or self.judged.tolerance is not None:
            return False
        sizes = [found.difference for found in self._found.values() if math.isfinite(found.difference)]
        if sizes and self._run.learning_apart > FOLLOWS * max(sizes):
            return False  # noise may hide that the gradients follow
        return all(map(self._is_representation, self._found.values()))

    def _is_representation(self, finding: Finding) -> bool:
        if finding.kind in exact.EXACT_KINDS:
            return bool(finding.evidence.get("permuted"))
        if finding.kind in ("missing", "extra", "non-finite", "shape", "recomputed"):
            return False
        return finding.phase in ("forward", "backward") or finding.path in self._run.permuted

    def judge(self, given: StepInput) -> list[Finding]:
        """Judge a step, and return its own findings in order. Extends `findings` and `judged`."""
        self._run.settings_differ |= any(finding.kind == "hyper-parameter" for finding in given.found)
        if given.first:
            self._run.permuted |= exact.permuted_paths(given.pairs)
        self.judged.absent.update(finding.path for finding in given.found if finding.kind in ("missing", "extra"))
        floors = SiteFloors(
            self._run,
            parameters=given.parameters,
            pairs=given.pairs,
            samples=given.samples,
            micro_steps=given.most_micro_steps,
            noise=given.noise,
            calibration=given.calibration,
            forced=self._forced,
        )
        if any(finding.kind == "random-state" for finding in given.found):
            floors.saw_other_inputs(math.inf)
        step = StepJudge(self.judged, given, floors)
        found = sorted((*given.found, *step.judge()), key=lambda finding: finding.order)
        floors.finish()
        if self._forced and any(finding.slot != LOGGED for finding in found):
            # Logged numbers cannot be forced, so they may follow from the other findings.
            found = [finding for finding in found if finding.slot != LOGGED]
        for finding in found:
            site = (_key(finding), finding.kind if finding.kind in ("hyper-parameter", "reported-norm") else "")
            held = self._found.get(site)
            count = held.evidence["num_steps"] + 1 if held else 1
            self._found[site] = replace(held or finding, evidence={**(held or finding).evidence, "num_steps": count})

        self.judged.previous = {
            pair.baseline.key: pair.baseline.summary
            for pair in given.pairs
            if pair.baseline.key.phase in ("forward", "backward", "grad", "optimizer")
        }
        return found


def _key(finding: Finding) -> SiteKey:
    return SiteKey(finding.phase, finding.stage, finding.path, finding.slot, finding.call, 0)


LENIENT = 2.0
"""A fault that shows half as clearly in the other run counts for both, so it does not tell them apart."""

_NO_NAMES = frozenset({"A", "An", "Rank", "Ranks", "Stage", "The"})
"""Words that begin a sentence with a capital letter, and have none within it."""


class BothRuns:
    """Judges each of two runs by the rules.

    Args:
        facts: Facts about each run.

    Attributes:
        shared: Faults of both runs, which do not tell them apart: one sentence per kind.
    """

    def __init__(self, facts: Sequence[RunFacts]) -> None:
        rules = [rule for rule in RULES if rule.tells_runs_apart]
        self._strict = [RunJudge(rules, one) for one in facts]
        self._lenient = [RunJudge(rules, one, strictness=LENIENT) for one in facts]
        self.shared: dict[str, str] = {}

    @property
    def unknown(self) -> list[str]:
        """One sentence for each thing that rules could not judge, and the comparison judges by the other run."""
        return [
            f"{name}: {_within(reason)}, so it is judged by the other run only."
            for name, judge in zip(RUNS, self._strict, strict=True)
            for reason in judge.unknown
        ]

    def findings(self, tables: Sequence[StepTable], *, step: int) -> list[Finding]:
        """Faults of one run that the other does not have, labeled with the run."""
        for judge, table in zip(self._strict, tables, strict=True):
            judge.note_unknown(table)
        strict = [judge.step(table, step=step) for judge, table in zip(self._strict, tables, strict=True)]
        lenient = [
            {_what(one) for one in judge.step(table, step=step)}
            for judge, table in zip(self._lenient, tables, strict=True)
        ]
        found = []
        for name, own, other in zip(RUNS, strict, lenient[::-1], strict=True):
            for one in own:
                if one.kind == "lost-update" and one.path in {path for _, path in other - {_what(one)}}:
                    continue  # the other run has a worse finding there
                if _what(one) in other:
                    self.shared.setdefault(one.kind, f"In both runs: {_within(one.message)}")
                else:
                    message = f"In the {name}, {_within(one.message)}"
                    found.append(replace(one, message=message, evidence={**one.evidence, "run": name}))
        return found


def _what(finding: Finding) -> tuple[str, str]:
    return finding.kind, finding.path


def _within(sentence: str) -> str:
    """A sentence as it stands after other words; names of classes and parameters stay as they are."""
    first, space, rest = sentence.partition(" ")
    return f"{first.lower() if first in _NO_NAMES else first}{space}{rest}"


def recomputation_findings(baseline: StepTable, candidate: StepTable, *, step: int) -> list[Finding]:
    """Outputs that differ when the candidate recomputes them, and not when the baseline does."""
    known = {pair.candidate.key for pair in changed_when_recomputed(baseline)}
    found = []
    for pair in changed_when_recomputed(candidate):
        key = pair.candidate.key
        if key in known:
            continue
        message = (
            f"In the candidate, activation checkpointing computes {key.path} again and gets another output: "
            "another dropout mask, or an operation that is not deterministic?"
        )
        found.append(
            finding_at(
                pair.candidate, step=step, kind="recomputed", message=message,
                difference=size_of(pair), floor=rounding(pair.candidate.dtype),
            )
        )  # fmt: skip
    return found


def changed_when_recomputed(table: StepTable) -> Iterator[Pair]:
    """Outputs that differ when they are recomputed, paired with the first computation.

    Modules that are called several times in a step are left out: they are not recomputed in the order of their calls.
    """
    calls = Counter((key.path, key.slot) for key in table if key.phase == "forward" and not key.stage)
    for key, entry in table.items():
        first = table.get(key._replace(stage=""))
        if key.stage != RECOMPUTED or first is None or calls[key.path, key.slot] != 1:
            continue
        pair = Pair(baseline=first, candidate=entry)
        if size_of(pair) > rounding(entry.dtype):
            yield pair
