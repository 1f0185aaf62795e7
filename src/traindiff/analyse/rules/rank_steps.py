"""The rule that ranks step together: after the same number of backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, StepTable, ranks_in
from traindiff.analyse.rules.rule import Contents, Rule


class RanksStepTogether(Rule):
    """Ranks share the gradients of a step, so each of them calls the optimizer as often as the others.

    Steps are counted by calls of the optimizer. A rank that calls it once more is one step ahead from then on: its step
    of that number has no pass of its own, and all that follows is held against another batch. A rank that has run
    out of inputs inside `Join` may step while it waits for the others, as `ZeroRedundancyOptimizer` does.
    """

    name = "rank-steps"
    finds = "A rank that calls the optimizer once more than the others, and is a step ahead from then on."
    needs = "several ranks"
    tells_runs_apart = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return contents.facts.num_ranks > 1

    def begin(self) -> None:
        """No rank had a pass so far."""
        self._before: frozenset[int] = frozenset()
        self._told: set[int] = set()

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step: ranks that step without a pass, while others have one."""
        passes = ranks_in({key: entry for key, entry in table.items() if _is_of_pass(entry)})
        without = self._before - passes - self._told
        self._before = frozenset(passes) or self._before  # of several optimizers, only one ends the recorded passes
        if not passes or not without:
            return
        idle = {rank for rank, found in self.facts.joined.items() if any(step in one.steps for one in found)}
        stepped = {part.rank for _, entry in sites(table, "grad") for part in entry.parts}
        if not (found := sorted(without & stepped - idle)):
            return
        self._told.update(found)
        several = len(found) > 1
        call, their, have, are = ("call", "their", "have", "are") if several else ("calls", "its", "has", "is")
        first = min(table.values(), key=lambda entry: entry.order)
        message = (
            f"{ranks_text(found)} {call} the optimizer once more than the other ranks: {their} step {step} {have} no "
            f"forward or backward pass, and {are} an additional step with the gradients of the one before. From here "
            "on, steps of the same number are not the same step."
        )
        rank = None if several else found[0]
        yield replace(self.finding(first, message, step=step, ranks=found), rank=rank)


def _is_of_pass(entry: MergedSite) -> bool:
    key = entry.key
    return key.phase == "loss" or (key[:2] == ("batch", "") and key.path != "rng")
