"""Ranks that an error ends in the middle of a forward pass, while others record nothing of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import SiteKey, StepTable, finding_at, ranks_in
from traindiff.analyse.rules.rule import Contents, Rule
from traindiff.core.site import ROOT


class ForwardPassesEnd(Rule):
    """An error ended some ranks in the middle of a forward pass, and the others left nothing of that step.

    If ranks do not agree on a collective, such as on the length of a buffer, some wait, and the library ends the
    others. The step before tells which module was to return next: the collective is in it, or in what is computed
    before it. The rule only warns, because the error itself was seen by whoever started the run.
    """

    name = "interrupted"
    finds = "An error ended ranks in the middle of a forward pass; the others left nothing of that step."
    needs = "a rank that an error ended, among others"
    warns = True
    judges_unfinished = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(contents.facts.errors) and contents.facts.num_ranks > 1

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._ranks: set[int] = set()
        self._returned: dict[SiteKey, frozenset[int]] = {}  # in order, with the ranks, in the latest finished step
        self._latest = -1

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """A finding about the step in which the run ended."""
        returned = {
            key: entry
            for key, entry in sorted(sites(table, "forward", stage=""), key=lambda item: item[1].order)
            if not entry.unobserved and entry.parts
        }
        if any(sites(table, phase, stage="") for phase in ("grad", "optimizer", "param")):
            self._latest = step
            self._returned = {key: ranks_of(one.parts) for key, one in returned.items()}
            self._ranks |= ranks_in(table)
            return
        here = ranks_in(table)
        missing = sorted(self._ranks - here)
        if step != self._latest + 1 or not returned or not missing or not here <= self.facts.errors.keys():
            return
        last, entry = list(returned.items())[-1]
        expected = [key for key, ranks in self._returned.items() if here <= ranks]
        if last not in expected or last == expected[-1]:
            return
        following = expected[expected.index(last) + 1]
        if following in returned:
            return
        name = following.path or ROOT
        message = (
            f"An error ended {ranks_text(sorted(here), capital=False)} in the forward pass of step {step}, after "
            f"{last.path or ROOT} had returned and before {name} did, which came next in step {self._latest}. "
            f"{ranks_text(missing)} left nothing of this step. Do ranks wait for each other in {name}, with tensors of "
            "other lengths?"
        )
        found = finding_at(
            entry, step=step, kind=self.name, message=message, rank=min(here) if len(here) == 1 else None,
            evidence={"errors": [self.facts.errors[rank] for rank in sorted(here)], "missing_ranks": missing},
        )  # fmt: skip
        yield replace(found, path=following.path, slot=following.slot)
