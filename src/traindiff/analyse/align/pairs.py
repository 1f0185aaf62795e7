"""Pair the sites of two runs, and collect the sites without a counterpart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traindiff.analyse.align.side import Side
from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, finding_at, num_micro_steps, only_rank
from traindiff.core.observation import MASTER, NO_GRADIENT, NOT_CALLED, SKIPPED
from traindiff.core.site import ROOT, label
from traindiff.core.summary import norm_of
from traindiff.core.tap_registry import asked_for_as, shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Two tables brought together.

    Attributes:
        pairs: In the baseline's execution order.
        only_baseline: Sites without a counterpart in the candidate.
        only_candidate: Sites without a counterpart in the baseline.
        unmerged: Pairs whose shapes show that one side's batch axis was not recognized.
    """

    pairs: tuple[Pair, ...]
    only_baseline: tuple[MergedSite, ...]
    only_candidate: tuple[MergedSite, ...]
    unmerged: tuple[Pair, ...]


def align(baseline: StepTable, candidate: StepTable) -> Aligned:
    """Pair sites by key. The candidate's paths are renamed already."""
    renamed = dict(candidate)
    pairs, unmerged, only_baseline = [], [], []
    split_alike = num_micro_steps(baseline) == num_micro_steps(candidate)
    # If both batch axes are known and one run has more samples, no axis needs to be declared.
    more_samples = any(key.phase == "batch" and _has_more_rows(entry, candidate) for key, entry in baseline.items())
    for key, entry in baseline.items():
        other = renamed.pop(key, None)
        if other is None:
            only_baseline.append(entry)
        elif more_samples and _has_more_rows(entry, candidate):
            pairs.append(Pair(baseline=entry, candidate=other))
        elif _is_unmerged(entry, other, split_alike=split_alike):
            unmerged.append(Pair(baseline=entry, candidate=other))
        else:
            pairs.append(Pair(baseline=entry, candidate=other))
    return Aligned(
        pairs=tuple(pairs),
        only_baseline=tuple(entry for entry in only_baseline if not _is_later_micro_step(entry, candidate)),
        only_candidate=tuple(e for e in renamed.values() if not _is_later_micro_step(e, baseline)),
        unmerged=tuple(unmerged),
    )


def in_baseline_order(pairs: Iterable[Pair]) -> Callable[[int], int]:
    """A function that maps places in the candidate's execution order to the baseline's, behind the last pair."""
    # Random state is read at the end of a forward pass; in a pipeline, at the end of each stage.
    flowing = (pair for pair in pairs if pair.baseline.key.path != "rng")
    places = sorted((pair.candidate.order, pair.baseline.order) for pair in flowing)
    ours = [candidate for candidate, _ in places]

    def place(order: int) -> int:
        before = bisect_left(ours, order)
        return places[before - 1][1] + 1 if before else 0

    return place


def _is_unmerged(baseline: MergedSite, candidate: MergedSite, *, split_alike: bool) -> bool:
    """True if an unrecognized batch axis on one side explains different shapes.

    Either only axis 0 differs, and one length is a multiple of the other; or the runs split their batches into
    different numbers of micro-batches, and one axis differs.
    """
    shapes = baseline.shape, candidate.shape
    if baseline.unobserved or candidate.unobserved:
        return False
    if (
        shapes[0] == shapes[1]
        or len(shapes[0]) != len(shapes[1])
        or baseline.key.phase not in ("batch", "forward", "backward")
    ):
        return False
    if baseline.key.phase == "batch" and split_alike and _num_ranks(baseline) == _num_ranks(candidate):
        return False  # both runs divide their batches alike, so the batches differ
    axes = [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if lengths[0] != lengths[1]]
    if not split_alike:
        return len(axes) <= 1 or any(one.parts and len(one.parts) > 1 for one in (baseline, candidate))
    small, large = sorted((shapes[0][0], shapes[1][0]))
    return axes == [0] and small > 0 and large % small == 0


def _has_more_rows(entry: MergedSite, others: StepTable) -> bool:
    """True if the batch axis is known in both runs, and one has more rows there."""
    other = others.get(entry.key)
    if other is None or entry.unobserved or other.unobserved or not (entry.batched and other.batched):
        return False
    return entry.shape[:1] != other.shape[:1] and entry.shape[1:] == other.shape[1:]


def _num_ranks(entry: MergedSite) -> int:
    return len(ranks_of(entry.parts))


def _is_later_micro_step(entry: MergedSite, others: StepTable) -> bool:
    """True if one run has a tensor once per micro-step and the other, with fewer micro-steps, less often."""
    return entry.key.micro_step > 0 and any(
        key.path == entry.key.path and key.phase == entry.key.phase for key in others
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unaligned:
    """A site that only one run has, or whose observations could not be paired.

    Attributes:
        phase: Phase of the observations.
        path: Canonical path; empty for the root.
        slot: Which tensor there.
        first_step: The first step without a counterpart.
        num_steps: Number of such steps.
        why: Why observations could not be paired; empty if one run has none.
    """

    phase: str
    path: str
    slot: str
    first_step: int
    num_steps: int
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The site in the schema of `--json`."""
        return {
            "phase": self.phase,
            "site": self.path or ROOT,
            "slot": self.slot,
            "first_step": self.first_step,
            "num_steps": self.num_steps,
            "why": self.why,
        }


_SitesAlone = dict[tuple[str, str, str], Unaligned]
"""Sites without a counterpart, by phase, path and slot."""


class Presence:
    """Collects sites without a counterpart, and makes findings of those that are certainly a difference.

    Args:
        sides: The two runs.

    Attributes:
        not_recorded: By side: what it was not asked to record, and the other run has.
        unaligned: By side: sites without a counterpart.
        unobserved: Sites that a run could not observe, with the reason.
        one_sided: Whether one run could not observe a site that the other observed, or could not for another reason.
        lack_stages: Sides that lack ranks with pipeline stages: a missing site may belong to these.
    """

    def __init__(self, sides: tuple[Side, Side]) -> None:
        self._runs = sides
        self.not_recorded: tuple[dict[str, None], dict[str, None]] = ({}, {})
        self.unaligned: tuple[_SitesAlone, _SitesAlone] = ({}, {})
        self.unobserved: dict[str, str] = {}
        self.one_sided = False
        self.lack_stages: set[int] = set()
        self._reported: set[tuple[int, str]] = set()
        self._rests = False, False  # by side: whether no parameter moves in this step
        self._given: set[SiteKey] = set()  # inputs that both runs gave their model in the same step
        self._called: set[str] = set()  # modules that both runs call in this step
        self._latest: dict[tuple[int, str, str, str], int] = {}  # the step that was counted last

    def judge(self, aligned: Aligned, *, step: int) -> tuple[list[Pair], list[Finding]]:
        """The pairs that can be measured, and findings for sites without a counterpart."""
        findings: list[Finding] = []
        pairs: list[Pair] = []
        for pair in aligned.pairs:
            baseline, candidate = pair.baseline, pair.candidate
            if baseline.key[:2] == ("batch", "") and baseline.key.path != "rng":
                self._given.add(baseline.key)
            if not (baseline.unobserved or candidate.unobserved):
                pairs.append(pair)
            elif baseline.unobserved and candidate.unobserved:
                unknown = candidate if baseline.unobserved.startswith(NO_GRADIENT) else baseline
                self._skip(unknown, alike=baseline.unobserved == candidate.unobserved)
            elif (baseline.unobserved or candidate.unobserved).startswith(NO_GRADIENT):
                side = 1 if candidate.unobserved else 0
                findings += self._absent(baseline, side=side, step=step, lacking=(baseline, candidate)[side])
            else:
                self._skip(baseline if baseline.unobserved else candidate, alike=False)
        self._rests = _rests([pair.baseline for pair in pairs]), _rests([pair.candidate for pair in pairs])
        findings += self._one_sided(aligned, step=step)
        for pair in aligned.unmerged:
            self._add(0, pair.baseline, step, why=_batch_axis_hint(pair))
        return pairs, findings

    def _one_sided(self, aligned: Aligned, *, step: int) -> Iterator[Finding]:
        """Findings for the sites without a counterpart."""
        called = {
            (pair.baseline.key.path, pair.baseline.key.call) for pair in aligned.pairs if _is_output(pair.baseline)
        }
        self._called = {path for path, _ in called}
        for side, entries in enumerate((aligned.only_baseline, aligned.only_candidate)):
            for entry in entries:
                is_called = (entry.key.path, entry.key.call) in called  # by both runs
                if is_called and entry.key.phase == "forward" and not entry.key.stage:
                    self._add(side, entry, step)  # the other lacks this tensor
                elif is_called and entry.key in self._given and not entry.unobserved:
                    yield _not_given(entry, side=1 - side, step=step)
                else:
                    yield from self._alone(entry, side=side, step=step)

    def _alone(self, entry: MergedSite, *, side: int, step: int) -> Iterator[Finding]:
        """Findings for an entry that only the run `side` has."""
        if entry.unobserved.startswith(NOT_CALLED):
            return  # the other run did not see a call of it either
        if entry.key.path == "rng":
            return  # the number of passes that draw from it is compared elsewhere
        if entry.unobserved:
            self._skip(entry, alike=False)
        elif what := self._not_recorded(entry, side=1 - side):
            self.not_recorded[1 - side].setdefault(what, None)
        elif entry.key.phase == "optimizer" and entry.key.slot == SKIPPED:
            if not self._rests[1 - side]:  # a fused optimizer leaves a step out by itself, and does not say so
                yield _skipped(entry, side=side, step=step)
        elif entry.key.slot == MASTER:
            return  # the other run has no master weights
        elif 1 - side not in self.lack_stages and self._exists_there(entry, side=1 - side):
            yield from self._absent(entry, side=1 - side, step=step)
        else:
            self._add(side, entry, step)

    def sides(self) -> tuple[tuple[Unaligned, ...], tuple[Unaligned, ...]]:
        """Unaligned sites of each side."""
        baseline, candidate = self.unaligned
        return tuple(baseline.values()), tuple(candidate.values())

    def _not_recorded(self, entry: MergedSite, *, side: int) -> str:
        """Name of the observation that the run `side` was not asked to record; empty if it was."""
        key = entry.key
        what = "evaluation" if key.stage == "evaluation" else asked_for_as(key.phase, key.stage)
        return "" if shows(self._runs[side].recorded, what) else what

    def _exists_there(self, entry: MergedSite, *, side: int) -> bool:
        """True if the run `side` has the module or parameter, so that a missing site is a difference.

        Optimizers may keep different state for the same update, so state counts only if a whole parameter is left out.
        """
        key = entry.key
        if key.stage or (key.phase == "optimizer" and key.path in self._runs[side].held):
            return False
        return key.phase in ("forward", "grad", "optimizer") and key.path in self._runs[side].paths

    def _absent(
        self, entry: MergedSite, *, side: int, step: int, lacking: MergedSite | None = None
    ) -> Iterator[Finding]:
        """A finding for a site that the run `side` lacks; once per path, because later ones follow from it.

        Args:
            entry: The site in the other run.
            side: The run that lacks it.
            step: Number of the step.
            lacking: The entry of that run which says so, if any; its parts name the ranks.
        """
        key, held = entry.key, self._runs[side].held
        if (side, key.path) in self._reported:
            return
        self._reported.add((side, key.path))
        run, other = (("baseline", "candidate"), ("candidate", "baseline"))[side]
        where = key.path or ROOT
        if key.phase == "forward" and key.path in self._called:
            message = f"The {other} calls {where} more often in one micro-step than the {run}."
        elif key.phase == "forward":
            message = f"The {run} does not call {where}; the {other} does."
        elif held and key.path not in held:
            message = f"The {run}'s optimizer does not hold {key.path}; the {other}'s does."
        else:
            ranks = sorted({part.rank for part in lacking.parts}) if lacking is not None else []
            several = 0 < len(ranks) < len(self._runs[side].recording.ranks)
            on = f" on {ranks_text(ranks, capital=False)}" if several else ""
            message = f"In the {run}, {where} gets no gradient{on}; in the {other} it does."
        kind = "missing" if side else "extra"
        yield finding_at(entry, step=step, kind=kind, message=message, rank=only_rank(lacking or entry))

    def _skip(self, entry: MergedSite, *, alike: bool) -> None:
        """Note a site without numbers; `alike` if the other run has none for the same reason."""
        if entry.unobserved.startswith(NO_GRADIENT):
            return  # there was nothing to observe
        key = entry.key
        self.unobserved.setdefault(f"{key.phase} {label(key.path, key.slot)}", entry.unobserved)
        self.one_sided |= not alike

    def _add(self, side: int, entry: MergedSite, step: int, why: str = "") -> None:
        key = entry.key
        site = (key.phase, key.path, key.slot)
        held = self.unaligned[side].get(site)
        again = self._latest.get((side, *site)) == step  # another tensor there, or in another evaluation of the loss
        self._latest[side, *site] = step
        self.unaligned[side][site] = (
            replace(held, num_steps=held.num_steps + (not again))
            if held
            else Unaligned(phase=key.phase, path=key.path, slot=key.slot, first_step=step, num_steps=1, why=why)
        )


def _is_output(entry: MergedSite) -> bool:
    return entry.key.phase == "forward" and not entry.key.stage and not entry.unobserved


def _rests(entries: Sequence[MergedSite]) -> bool:
    """True if updates are known, and none of them moves its parameter."""
    updates = [entry for entry in entries if entry.key[:2] == ("update", "")]
    return bool(updates) and not any(norm_of(entry.summary) for entry in updates)


def _skipped(entry: MergedSite, *, side: int, step: int) -> Finding:
    """A finding for a step that only one run's loss scaler left out."""
    key, run = entry.key, ("baseline", "candidate")[side]
    message = (
        f"The {run}'s loss scaler leaves out this step of {key.path}, because a gradient is not finite; the other "
        "run takes it."
    )
    return finding_at(entry, step=step, kind="skipped", message=message, rank=only_rank(entry), evidence={"run": run})


def _not_given(entry: MergedSite, *, side: int, step: int) -> Finding:
    """A finding for an input that the run `side` gave its model in earlier steps, as the other run does now."""
    run, other = (("baseline", "candidate"), ("candidate", "baseline"))[side]
    message = (
        f"The {run} gives the model no {label(entry.key.path, entry.key.slot)} in this step, the {other} does, as both "
        "did in earlier steps: is a state, or a part of the batch, lost?"
    )
    return finding_at(entry, step=step, kind="batch", message=message, rank=only_rank(entry))


def _batch_axis_hint(pair: Pair) -> str:
    baseline, candidate = list(pair.baseline.shape), list(pair.candidate.shape)
    return (
        f"its shape is {baseline} in the baseline and {candidate} in the candidate: a batch axis that was not "
        f'recognized, or wrongly; declare it with record(batch_axis={{"{pair.baseline.key.path or ROOT}": 0 or None}})'
    )
