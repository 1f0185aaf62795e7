"""From a finding into the operators of its module: the first one that differs although its inputs agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from traindiff.analyse.compare.operator_localization import (
    AboutOperator,
    Cause,
    Farthest,
    OperatorLocalization,
    OperatorRow,
    localization_message,
)
from traindiff.analyse.compare.operator_pairs import (
    CallKey,
    OperatorPair,
    OperatorRun,
    RunKey,
    by_call,
    operator_runs,
    paired_calls,
)
from traindiff.analyse.findings import Finding, ratio_of
from traindiff.analyse.merge.distance import Pair, size_of
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import MergedSite, Part
from traindiff.analyse.noise.measured import SAFETY
from traindiff.analyse.noise.uncalibrated import GAIN
from traindiff.core.summary import rounding
from traindiff.storage import Run

BEFORE, BEHIND = 6, 3
"""Rows of the walk that are kept before and behind the first difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperators:
    """The operators of one step.

    Attributes:
        calls: Operators of baseline and candidate, under the baseline's names, by the module call in which they ran.
        noise: Operators of the noise recordings.
        described: Descriptions of operators in `rank.json`, of both runs, by rank.
    """

    calls: tuple[Mapping[CallKey, Sequence[OperatorRun]], Mapping[CallKey, Sequence[OperatorRun]]]
    noise: Sequence[Mapping[RunKey, OperatorRun]]
    described: tuple[Mapping[int, Mapping[str, Any]], Mapping[int, Mapping[str, Any]]]


class _Measured(NamedTuple):
    """An operator in both runs: the farthest of its inputs and of its outputs."""

    given: Farthest
    made: Farthest

    def is_given_other(self, explained: float) -> bool:
        """True if its inputs differ by more than the operators before it were found to differ without a fault."""
        return self.given.size > max(self.given.floor, explained)

    @property
    def makes_other(self) -> bool:
        """True if its outputs differ by more than its inputs explain."""
        inherited = GAIN * self.given.size if math.isfinite(self.given.size) else math.inf
        return self.made.size > max(self.made.floor, inherited)


def localize(finding: Finding, given: StepOperators) -> OperatorLocalization | None:
    """The first operator that differs on the way to a finding; None if no operators were recorded there.

    Args:
        finding: Of an activation, of the gradient of one, or of that of a parameter.
        given: The operators of its step.
    """
    best: OperatorLocalization | None = None
    for rank, micro_step in sorted({key[:2] for key in given.calls[0]} & {key[:2] for key in given.calls[1]}):
        if finding.rank not in (None, rank) or finding.micro_step not in (None, micro_step):
            continue
        calls = [{k: v for k, v in side.items() if k[:2] == (rank, micro_step)} for side in given.calls]
        for is_on_the_way in (_is_close, _is_anywhere):
            keys = [key for key in dict.fromkeys((*calls[0], *calls[1])) if is_on_the_way(finding, key)]
            chosen = [{key: side[key] for key in keys if key in side} for side in calls]
            pairs = [pair for pair in paired_calls(chosen[0], chosen[1]) if _is_before(finding, pair)]
            if not any(pair.baseline for pair in pairs) or not any(pair.candidate for pair in pairs):
                continue
            found = _walked(finding, pairs, given)
            if best is None or _TELLING.index(found.cause) < _TELLING.index(best.cause):
                best = found
            if best.cause in ("operator", "other-operators"):
                break
    return best


_TELLING: tuple[Cause, ...] = ("operator", "other-operators", "other-inputs", "none")
"""Kinds of first differences, those that tell most first."""


def _is_close(finding: Finding, key: CallKey) -> bool:
    """True if a module call usually is where the difference arose.

    An output comes from the module's own operators, and from those of the modules around it that ran before. The
    gradient of an output comes from the backward pass of the modules that used it.
    """
    _, _, phase, module, call = key
    if finding.phase == "forward":
        own = module == finding.path and call == finding.call
        return phase == "forward" and (own or _is_around(module, finding.path))
    if finding.phase == "grad":
        return phase == "backward" and module == finding.path.rpartition(".")[0]
    return phase == "backward"


def _is_anywhere(finding: Finding, key: CallKey) -> bool:
    """True if a call may be where the difference arose: a backward pass also reads tensors of the forward pass."""
    return finding.phase != "forward" or key[2] == "forward"


def _is_around(outer: str, path: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _is_before(finding: Finding, pair: OperatorPair) -> bool:
    """True if an operator ran before the finding's site was observed. Unknown for the candidate's own ones."""
    return finding.phase == "grad" or pair.baseline is None or pair.baseline.order < finding.order


def _walked(finding: Finding, pairs: Sequence[OperatorPair], given: StepOperators) -> OperatorLocalization:
    """The walk through the operators, up to the first that differs."""
    explained = finding.floor if math.isfinite(finding.floor) else 0.0
    since: list[OperatorRow] = []  # operators of one run only, after the last common one
    alone: list[tuple[OperatorPair, OperatorRow]] = []  # all operators of one run only
    rows: list[OperatorRow] = []
    cause: Cause = "none"
    size: Farthest | None = None
    for pair in pairs:
        measured = _measured(pair, given.noise)
        rows.append(_row(pair, measured, given, explained))
        if measured is None:
            since.append(rows[-1])
            alone.append((pair, rows[-1]))
            continue
        if measured.makes_other:
            cause, size = "operator", measured.made
        elif measured.is_given_other(explained):
            since = since or _made_by(pair, measured.given.slot, alone)
            cause, size = "other-operators" if since else "other-inputs", measured.given
        if size is not None:
            break
        explained = max(explained, measured.made.size if math.isfinite(measured.made.size) else 0.0)
        since = []
    place = len(rows) - 1
    if size is None and since:
        cause = "other-operators"
    behind = pairs[place + 1 : place + 1 + BEHIND]
    further = [_row(pair, _measured(pair, given.noise), given, explained) for pair in behind]
    at = pairs[place].candidate or pairs[place].baseline
    assert at is not None
    return OperatorLocalization(
        step=finding.step, micro_step=at.micro_step, rank=at.rank, phase=finding.phase, path=finding.path,
        slot=finding.slot, module=at.module, cause=cause,
        operator="" if cause == "none" else rows[place].shown.path,
        operator_slot=size.slot if size else "", difference=size.size if size else math.nan,
        floor=size.floor if size else 0.0,
        message=localization_message(cause, rows[place], since, size),
        rows=(*rows[max(0, place - BEFORE) :], *further),
        num_operators=sum(pair.baseline is not None and pair.candidate is not None for pair in pairs),
    )  # fmt: skip


def _made_by(pair: OperatorPair, slot: str, alone: Sequence[tuple[OperatorPair, OperatorRow]]) -> list[OperatorRow]:
    """Operators of one run alone whose outputs have the same bits as an operator's input."""
    assert pair.baseline is not None
    assert pair.candidate is not None
    inputs = (pair.baseline.inputs.get(slot), pair.candidate.inputs.get(slot))
    bits = [None if one is None else int(one.summary["fingerprint"]) for one in inputs]
    found = []
    for made, row in alone:
        sides = zip((made.baseline, made.candidate), bits, strict=True)
        outputs = ((one.outputs.values(), wanted) for one, wanted in sides if one is not None)
        if any(int(entry.summary["fingerprint"]) == wanted for entries, wanted in outputs for entry in entries):
            found.append(row)
    return found


def _row(pair: OperatorPair, measured: _Measured | None, given: StepOperators, explained: float) -> OperatorRow:
    both = zip((pair.baseline, pair.candidate), given.described, strict=True)
    baseline, candidate = (None if one is None else _about(one, described) for one, described in both)
    if measured is None:
        message = f"only in the {'candidate' if baseline is None else 'baseline'}"
        return OperatorRow(baseline=baseline, candidate=candidate, message=message)
    message = "its inputs agree, its output does not" if measured.makes_other else "agrees"
    if not measured.makes_other and measured.is_given_other(explained):
        message = "is given other inputs"
    return OperatorRow(
        baseline=baseline, candidate=candidate, message=message,
        given=measured.given.size, made=measured.made.size, floor=measured.made.floor,
    )  # fmt: skip


def _about(run: OperatorRun, described: Mapping[int, Mapping[str, Any]]) -> AboutOperator:
    found = described.get(run.rank, {}).get(run.phase, {}).get(run.path, {})
    source = found.get("source")
    return AboutOperator(
        path=run.path,
        source=f"{source['file']}:{source['line']}" if source else "",
        code=source["code"] if source else "",
        settings=found.get("settings", {}),
        node=found.get("node", ""),
        of=found.get("of", ""),
    )


def _measured(pair: OperatorPair, noise: Sequence[Mapping[RunKey, OperatorRun]]) -> _Measured | None:
    baseline, candidate = pair.baseline, pair.candidate
    if baseline is None or candidate is None:
        return None
    replicas = [one for runs in noise if (one := runs.get(baseline.key)) is not None]
    return _Measured(
        given=_farthest(baseline.inputs, candidate.inputs, [one.inputs for one in replicas]),
        made=_farthest(baseline.outputs, candidate.outputs, [one.outputs for one in replicas]),
    )


def _farthest(
    baseline: Mapping[str, MergedSite],
    candidate: Mapping[str, MergedSite],
    replicas: Sequence[Mapping[str, MergedSite]],
) -> Farthest:
    found = []
    for slot, entry in baseline.items():
        other = candidate.get(slot)
        if other is None or entry.unobserved or other.unobserved:
            continue
        shown = [size_of(Pair(baseline=entry, candidate=one[slot])) for one in replicas if slot in one]
        floor = max(rounding(entry.dtype), rounding(other.dtype), SAFETY * max(shown, default=0.0))
        found.append(Farthest(size_of(Pair(baseline=entry, candidate=other)), floor, slot))
    return max(found, key=lambda one: ratio_of(one.size, one.floor), default=Farthest())


MOST = 12
"""Number of findings that are traced into operators: the first ones."""

_SEARCHED = ("forward", "backward", "grad")


class OperatorSearch:
    """Traces findings into operators while the steps of two runs come.

    Args:
        runs: Baseline and candidate.
        rename: Turns the candidate's paths into the baseline's.

    Attributes:
        found: Results so far.
    """

    def __init__(self, runs: tuple[Run, Run], rename: Rename) -> None:
        self._runs = runs
        self._rename = rename
        self._tried: set[tuple[str, str, str]] = set()
        self._alone: dict[str, None] = {}
        self.found: list[OperatorLocalization] = []

    def see(
        self,
        findings: Iterable[Finding],
        operators: tuple[Sequence[Part], Sequence[Part]],
        noise: Sequence[Sequence[Part]],
    ) -> None:
        """Trace the findings of a step.

        Args:
            findings: In execution order.
            operators: Observations of operators in it, of baseline and candidate.
            noise: The same of noise recordings.
        """
        if not all(operators):
            self._alone["baseline" if operators[0] else "candidate"] = None
            return
        wanted = [one for one in findings if one.phase in _SEARCHED and one.kind not in ("missing", "extra")]
        wanted = [one for one in wanted if (one.phase, one.path, one.slot) not in self._tried]
        room = MOST - len(self.found)
        if not wanted or room <= 0:
            return
        given = StepOperators(
            calls=(by_call(operator_runs(operators[0])), by_call(operator_runs(operators[1], self._rename))),
            noise=[{run.key: run for run in operator_runs(one)} for one in noise],
            described=(_described(self._runs[0]), _described(self._runs[1])),
        )
        for finding in wanted[:room]:
            self._tried.add((finding.phase, finding.path, finding.slot))
            if (found := localize(finding, given)) is not None:
                self.found.append(found)

    def told(self, first: Finding) -> Finding:
        """The first finding, with the result for its module, if there is one."""
        for one in self.found:
            seen_at = (one.step, one.phase, one.path, one.slot)
            if seen_at == (first.step, first.phase, first.path, first.slot) and one.cause != "none":
                evidence = {**first.evidence, "operator": one.operator}
                return replace(first, message=f"{first.message} Inside it: {one.message}", evidence=evidence)
        return first

    @property
    def notes(self) -> list[str]:
        """One sentence for each limit of the search."""
        return [f"Only the {run} has recorded operators, so none could be compared." for run in self._alone]


def _described(run: Run) -> dict[int, Mapping[str, Any]]:
    return {rank: run.rank_content(rank).get("operators", {}) for rank in run.ranks}
