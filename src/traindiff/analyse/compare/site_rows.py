"""The rows of a comparison: each site's weightiest difference so far, and the steps in which it was compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

from traindiff.analyse.compare.verdict import SiteDifference
from traindiff.analyse.findings import SITE_WORDS, SiteWord, ratio_of
from traindiff.analyse.merge.site import MergedSite, SiteKey


@dataclass(slots=True)
class _Tally:
    """What is counted of a site; `identical` is whether all evaluations of the latest step had the same bits."""

    weight: tuple[int, float]
    latest: tuple[str, int] = ("", -1)  # optimizer and step
    identical: bool = False
    num_steps: int = 0
    num_identical_steps: int = 0
    first_other_bits: int | None = None


class SiteRows:
    """Keeps a row for each site. Counting a step makes no new row, because most steps have no weightier difference.

    Attributes:
        weightiest: Each site's weightiest difference so far, without its counts.
        optimizer: Name of the optimizer whose step is compared: each counts its own steps.
    """

    def __init__(self) -> None:
        self.optimizer = ""
        self.weightiest: dict[SiteKey, SiteDifference] = {}
        self._tallies: dict[SiteKey, _Tally] = {}

    def note(
        self,
        entry: MergedSite,
        step: int,
        numbers: tuple[float, float, float],
        word: SiteWord,
        *,
        equal: bool,
        other_bits: bool,
    ) -> None:
        """Note a site in a step, or in one of its evaluations of the loss.

        Args:
            entry: The site.
            step: The step.
            numbers: Its difference, floor and undisturbed floor.
            word: What the difference means.
            equal: Whether it counts as the same.
            other_bits: Whether its bits are known to differ.
        """
        key, (size, floor, undisturbed) = entry.key, numbers
        weight, tally = (SITE_WORDS.index(word), ratio_of(size, floor)), self._tallies.get(key)
        if tally is None or weight > tally.weight:
            self.weightiest[key] = SiteDifference(
                phase=key.phase, stage=key.stage, path=key.path, slot=key.slot, call=key.call, step=step,
                order=entry.order, difference=size, floor=floor, undisturbed=undisturbed, word=word,
                num_steps=1, num_identical_steps=0,
            )  # fmt: skip
            if tally is None:
                tally = self._tallies[key] = _Tally(weight)
            tally.weight = weight
        latest = (self.optimizer, step)
        again = tally.latest == latest
        identical = equal and (tally.identical or not again)
        tally.num_steps += not again
        tally.num_identical_steps += identical - (again and tally.identical)
        tally.latest, tally.identical = latest, identical
        if other_bits and tally.first_other_bits is None:
            tally.first_other_bits = step

    def count_again(self, step: int, num_steps: int) -> None:
        """Count further steps, before this one, in which the sites of this one were compared and had the same bits."""
        for tally in self._tallies.values():
            if tally.latest == (self.optimizer, step):
                tally.num_steps += num_steps
                tally.num_identical_steps += num_steps

    def rows(self) -> tuple[SiteDifference, ...]:
        """The rows with their counts, in execution order."""
        rows = [
            replace(
                self.weightiest[key], num_steps=tally.num_steps, num_identical_steps=tally.num_identical_steps,
                first_other_bits=tally.first_other_bits,
            )
            for key, tally in self._tallies.items()
        ]  # fmt: skip
        return tuple(sorted(rows, key=lambda row: row.order))
