"""Gaps: sites that traindiff failed to observe. They are unknown, and neither absent nor equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from traindiff.analyse.findings import more_text, ranks_text, steps_text
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.core.observation import ITSELF, MAYBE_UNSEEN, TAP_FAILED, UNSEEN
from traindiff.core.site import label
from traindiff.core.tap_registry import EVERYTHING, LOSES
from traindiff.storage import Run


def without_missing_samples(
    table: StepTable, missing: Sequence[int], *, pipelines: int | None = None
) -> dict[SiteKey, MergedSite]:
    """The table of a step; sites are unknown if ranks are missing that would have contributed to them.

    Args:
        table: The step.
        missing: Data-parallel ranks that have not recorded the step.
        pipelines: Number of pipelines that share the batch; None if ranks are not pipeline stages. A site is complete
            if as many ranks have it.
    """
    if not missing:
        return dict(table)
    who = ranks_text(missing, capital=False)
    reason = f"{who} did not record this step, so a part of the batch is missing"
    return {
        key: replace(entry, unobserved=reason)
        if (entry.batched or entry.summed) and (pipelines is None or len(ranks_of(entry.parts)) < pipelines)
        else entry
        for key, entry in table.items()
    }


def unrecorded_of(run: Run) -> list[str]:
    """Sentences about what the process of a run trained beside what was recorded."""
    contents = (run.rank_content(rank) for rank in run.ranks)
    return list(dict.fromkeys(sentence for one in contents for sentence in one.get("not_followed", ())))


class _Fault(NamedTuple):
    tap: str
    step: int
    message: str


class Lost(NamedTuple):
    """Observations that are unknown.

    Attributes:
        phase: Phase; empty for all of them.
        stage: Stage of it; None for all of them.
        path: Path; `ITSELF` for all of them.
    """

    phase: str
    stage: str | None
    path: str = ITSELF


@dataclass(slots=True)
class _Gap:
    """Steps and sites that were not observed for one reason."""

    steps: dict[int, None] = field(default_factory=dict)
    sites: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class FailedTaps:
    """Collects the gaps of a run, step by step.

    Attributes:
        ranks: Ranks by the tap that failed, its step and the reason.
        in_step: Gaps of the latest step alone, with the entry that reports each.
    """

    ranks: dict[_Fault, list[int]] = field(default_factory=dict)
    in_step: dict[Lost, MergedSite] = field(default_factory=dict)
    _gaps: dict[str, _Gap] = field(default_factory=dict)

    def see(self, table: StepTable, other: StepTable | None = None, *, step: int) -> None:
        """Note the gaps of a step; `other` is the same step of the run that it is compared with, if any."""
        self.in_step = {}
        for key, entry in table.items():
            if not entry.unobserved:
                continue
            if _is_fault(key, entry):
                fault = _Fault(key.slot, step, entry.unobserved)
                self.ranks.setdefault(fault, []).extend(part.rank for part in entry.parts)
            elif entry.unobserved.startswith((UNSEEN, MAYBE_UNSEEN)):
                self.in_step[_lost_with(key)] = entry
        if not self.in_step:
            return
        seen = [key for one in (table, other or {}) for key, entry in one.items() if not entry.unobserved]
        unseen = [lost for lost, entry in self.in_step.items() if entry.unobserved.startswith(UNSEEN)]
        for lost, entry in self.in_step.items():
            if any(one.path == ITSELF != lost.path and one.phase == lost.phase for one in unseen):
                continue  # the whole phase is missing already
            if entry.unobserved.startswith(UNSEEN) or any(_covers(lost, key) for key in seen):
                gap = self._gaps.setdefault(entry.unobserved.partition(": ")[2], _Gap())
                gap.steps[step] = None
                gap.sites[label(lost.path, "") if lost.path != ITSELF else f"the phase {lost.phase}"] = None

    @property
    def lost(self) -> tuple[Lost, ...]:
        """The gaps that hold in the latest step."""
        failed = {lost: None for fault in self.ranks for lost in LOSES.get(fault.tap, EVERYTHING)}
        return (*(Lost(*lost) for lost in failed), *self.in_step)

    def notes(self) -> list[str]:
        """One sentence about each gap."""
        return [
            *(
                f"On {ranks_text(sorted({*ranks}), capital=False)}, {fault.message}. What it would have seen from step "
                f"{fault.step} on is unknown."
                for fault, ranks in self.ranks.items()
            ),
            *(_sentence(why, gap) for why, gap in self._gaps.items()),
        ]


def without_lost(table: StepTable, lost: Iterable[Lost]) -> dict[SiteKey, MergedSite]:
    """The table of a step without the gaps of this run and of the run that it is compared with."""
    everywhere = tuple(one for one in lost if one.path == ITSELF)
    at: dict[str, list[Lost]] = {}
    for one in lost:
        if one.path != ITSELF:
            at.setdefault(one.path, []).append(one)
    some = bool(everywhere or at)
    return {
        key: entry
        for key, entry in table.items()
        if not (
            (entry.unobserved and (_is_fault(key, entry) or entry.unobserved.startswith((UNSEEN, MAYBE_UNSEEN))))
            or (some and any(_covers(one, key) for one in (*everywhere, *at.get(key.path, ()))))
        )
    }


def _is_fault(key: SiteKey, entry: MergedSite) -> bool:
    return key.path == ITSELF and entry.unobserved.startswith(TAP_FAILED.format(tap=key.slot))


def _lost_with(key: SiteKey) -> Lost:
    """The gap that an entry reports: for activations and batches all stages, for the optimizer's side one."""
    stage = key.stage if key.stage or key.phase in ("grad", "optimizer", "param") else None
    return Lost(phase=key.phase, stage=stage, path=key.path)


def _covers(lost: Lost, key: SiteKey) -> bool:
    if lost.path not in (ITSELF, key.path):
        return False
    phases = (lost.phase, "update") if lost.phase == "param" else (lost.phase,)
    return ("" in phases or key.phase in phases) and lost.stage in (None, key.stage)


def _sentence(why: str, gap: _Gap) -> str:
    sites = list(gap.sites)
    more = more_text(len(sites) - 1, "site")
    return f"Not observed in {steps_text(list(gap.steps))}, so unknown: {sites[0]}{more}. The reason: {why}."
