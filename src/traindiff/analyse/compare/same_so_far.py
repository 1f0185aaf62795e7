"""Two runs that have the same bits so far: of their steps only the latest needs to be judged."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from traindiff.analyse.align.side import gradient_norms
from traindiff.analyse.align.two_runs import AlignedStep, RepeatedStep, TwoRuns
from traindiff.analyse.compare.judge import Judge
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.recorded_calls import clips
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.lost import FLOWING, lost_in_rounding
from traindiff.analyse.noise.nonlinear import FEW


class SameSoFar:
    """Lets steps wait to be judged while they have the same bits in both runs.

    No site of such a step is a finding, and all differences are 0. What its judgment leaves for later steps (floors,
    norms, the baseline's numbers) is replaced by that of the next step with the same sites. So only the latest step is
    judged: when a step follows that is another one, or at the end. Counts of steps include all that waited.

    Steps are judged at once where this does not hold: if something was found before, if numbers are not finite, if
    gradients are clipped, if further gradients are lost in rounding, or if a step has sites that only one run has.

    Args:
        judge: Judges the steps.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._layout: object = None  # of the step that was judged last, if later ones may wait
        self._sites: list[SiteKey] = []  # of it
        self._lost: frozenset[SiteKey] = frozenset()  # sites that have no floor in the waiting step
        self._waiting: AlignedStep | RepeatedStep | None = None
        self._entries: Sequence[MergedSite] = ()  # of it
        self._optimizer = ""  # of all these steps
        self._num_waiting = 0

    def waits(self, given: AlignedStep | RepeatedStep, baseline: RunStep) -> bool:
        """True if a step need not be judged before the next one; it is kept in place of the one before."""
        if self._layout is None or baseline.layout is not self._layout:
            return False
        entries = self._in_order(given, baseline)
        if entries is None:
            return False
        lost = _without_floors(entries)
        if self._num_waiting and not lost <= self._lost:
            return False  # a site keeps the floor of the latest step in which it had one
        self._lost = lost
        if self._waiting is not None:  # floors know the steps before
            run, before = self._judge.run, self._waiting
            run.at(self._optimizer, before.step)
            run.see_again(before.tables[0], self._entries)
        self._waiting, self._entries = given, entries
        self._num_waiting += 1
        return True

    def judged(self, given: AlignedStep, baseline: RunStep) -> None:
        """Note a step that was judged. Steps like it may wait if nothing of it is left to be decided."""
        judge = self._judge
        plain = self._is_plain(given, baseline) and judge.all_equal and not judge.findings
        undecided = judge.run.mixing or judge.run.loss.lacks_scale or any(map(self._is_undecided, given.pairs))
        self._layout = baseline.layout if plain and not undecided else None
        self._sites, self._optimizer = [one.key for one in _in_order(given)], baseline.optimizer

    def _in_order(self, given: AlignedStep | RepeatedStep, baseline: RunStep) -> list[MergedSite] | None:
        """The baseline's sites of a step, in execution order; None if it is not like the step that was judged last."""
        if isinstance(given, RepeatedStep):  # it has nothing but what the step before has
            if not baseline.finite or baseline.operators or baseline.products or not self._has_sites(given):
                return None
            return [given.table[key] for key in self._sites]
        if not (given.same and self._is_plain(given, baseline)):
            return None
        entries = _in_order(given)
        return entries if [one.key for one in entries] == self._sites else None

    def _has_sites(self, given: RepeatedStep) -> bool:
        """True if a step has the updates that were judged last; all other sites are those of the step before."""
        judged = {key for key in self._sites if key[:2] == ("update", "")}
        return judged == {entry.key for entry in given.side.updates} and all(map(given.table.__contains__, self._sites))

    def align(self, runs: TwoRuns) -> None:
        """Align the step that waits, before the runs go on to one that does not repeat it."""
        if isinstance(self._waiting, RepeatedStep):
            self._waiting = runs.aligned(self._waiting)

    def taken(self, runs: TwoRuns) -> AlignedStep | None:
        """The latest step that waits, which is judged now; None if there is none."""
        self.align(runs)
        waiting, self._waiting, self._entries = self._waiting, None, ()
        assert not isinstance(waiting, RepeatedStep)
        return waiting

    def count(self, step: int) -> None:
        """Count the steps that waited with the one that was judged for all of them."""
        self._judge.sites.count_again(step, self._num_waiting - 1)
        self._num_waiting = 0

    def _is_plain(self, given: AlignedStep, baseline: RunStep) -> bool:
        """True if a step has nothing but pairs of finite numbers."""
        aligned = given.aligned
        return not (
            given.first or given.findings or given.earlier or given.evaluation is not None or given.unplaced
            or aligned.only_baseline or aligned.only_candidate or aligned.unmerged
            or baseline.operators or baseline.products or not baseline.finite
            or baseline.without_idle or any(map(clips, given.tables))
        )  # fmt: skip

    def _is_undecided(self, pair: Pair) -> bool:
        """True if a later step may tell for the first time whether an update is linear; see `NonlinearUpdates`."""
        key, run = pair.baseline.key, self._judge.run
        known = key.path in run.adaptive or key.path in run.nonlinear
        return key.phase == "update" and not known and int(pair.baseline.summary["count"]) >= FEW


def _in_order(given: AlignedStep) -> list[MergedSite]:
    return sorted((pair.baseline for pair in given.pairs), key=attrgetter("order"))


def _without_floors(entries: Sequence[MergedSite]) -> frozenset[SiteKey]:
    """Sites whose floor in a step may be no measure for later steps: what is lost in rounding, or is zero.

    Args:
        entries: Those of the baseline; the candidate's have the same bits.
    """
    zero = (one.key for one in entries if one.key.phase in _RESTS and not one.summary["sum_of_squares"])
    pairs = [Pair(baseline=one, candidate=one) for one in entries if one.key.phase in FLOWING]
    return frozenset((*lost_in_rounding([*pairs, *gradient_norms(pairs)]), *zero))


_RESTS = ("grad", "update")
"""Phases in which a tensor may be zero because nothing moves."""
