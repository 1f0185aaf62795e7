"""Steps of several optimizers: whether one run leaves out a step of one of them."""

from __future__ import annotations

from traindiff.analyse.findings import Finding, times_text
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.storage import Run


class Turns:
    """Finds the first step before which another optimizer has stepped more often in one run.

    Steps have numbers of their own for each optimizer. If a run leaves one out, its next one has that number: nothing
    is missing, and all numbers after it differ. Two optimizers may be stepped in another order in each run, so that
    only a change of how far they are apart counts. If a step comes several steps of another optimizer later, one step
    before it was left out, rather than that several others were added.

    Args:
        runs: Baseline and candidate. Nothing is judged if they recorded other steps.
    """

    def __init__(self, runs: tuple[Run, Run]) -> None:
        chosen = [[run.run["settings"].get(name) for name in ("every", "steps")] for run in runs]
        self._comparable = chosen[0] == chosen[1]
        self._apart: dict[tuple[str, str], int] = {}  # by optimizer and the other one: further steps of the candidate's
        self._told: set[str] = set()
        self._begun: tuple[int, int] | None = None  # first step of each run: one that continues may begin late

    def findings(self, baseline: RunStep, candidate: RunStep) -> list[Finding]:
        """At most one finding for each optimizer; steps must be given in order."""
        if not (self._comparable and baseline.table and candidate.table):
            return []
        self._begun = self._begun or (baseline.step, candidate.step)
        found = []
        for name in sorted({*baseline.after, *candidate.after} - {baseline.optimizer}):
            if any(
                begun and name not in one.after for one, begun in zip((baseline, candidate), self._begun, strict=True)
            ):
                continue  # how often it has stepped in a run that begins late is known when it has done so once more
            counts = [one.after.get(name, -1) + 1 for one in (baseline, candidate)]
            apart, pair = counts[1] - counts[0], (baseline.optimizer, name)
            before, self._apart[pair] = self._apart.get(pair), apart
            if (abs(apart) <= 1 if before is None else apart == before) or {name, baseline.optimizer} & self._told:
                continue
            moved, step, optimizer, other = apart - (before or 0), baseline.step, baseline.optimizer, name
            if abs(moved) > 1:
                moved, optimizer, other = -moved, other, optimizer
                step, counts = min(counts), [step + (one == min(counts)) for one in counts]
            self._told.add(other)
            did = "leaves out a" if moved < 0 else "takes a further"
            message = (
                f"Before step {step} of {optimizer}, {other} has stepped {times_text(counts[0])} in "
                f"the baseline and {times_text(counts[1])} in the candidate: the candidate {did} step."
            )
            evidence = {"optimizer": other, "baseline": counts[0], "candidate": counts[1]}
            first = min(entry.order for entry in baseline.table.values())
            found.append(
                Finding(
                    step=step, phase="optimizer", stage="", path=other, slot="step", order=first - 1,
                    kind="turn", message=message, evidence=evidence,
                )
            )  # fmt: skip
        return found
