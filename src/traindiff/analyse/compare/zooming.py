"""From a finding into the operators of its module: which is the first that differs although its inputs agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traindiff.analyse.compare.operator_pairs import CallKey, OperatorPair, by_call, paired_calls
from traindiff.analyse.compare.zoom import AboutOperator, OperatorRow, Size, Zoom, ZoomCause, first_says
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair, difference, equal_bits
from traindiff.analyse.merge.operators import OperatorRun, operator_runs
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.step_table import Entry, Part
from traindiff.analyse.noise.replicas import SAFETY
from traindiff.analyse.noise.uncalibrated import GAIN
from traindiff.core.summary import rounding
from traindiff.storage import Run

BEFORE, BEHIND = 6, 3
"""Rows that are kept of the walk, around the first difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoomInput:
    """The operators of one step.

    Attributes:
        runs: Of baseline and candidate, under the baseline's names.
        noise: The same of noise recordings.
        described: What `rank.json` says of operators, of both runs, by rank.
    """

    runs: tuple[Sequence[OperatorRun], Sequence[OperatorRun]]
    noise: Sequence[Sequence[OperatorRun]]
    described: tuple[Mapping[int, Mapping[str, Any]], Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """An operator in both runs: the largest difference of what it is given, and of what it makes of it."""

    given: float
    given_floor: float
    given_slot: str
    made: float
    made_floor: float
    made_slot: str

    def is_given_other(self, explained: float) -> bool:
        """Whether what it is given differs, by more than what was found to be no difference before it."""
        return self.given > max(self.given_floor, explained)

    @property
    def makes_other(self) -> bool:
        """Whether more comes out than what came in explains."""
        inherited = GAIN * self.given if math.isfinite(self.given) else math.inf
        return self.made > max(self.made_floor, inherited)


_RunKey = tuple[int, int, str, str, int]
"""Rank, micro-step, phase, path and call of an operator: the same in every run of the same code."""


def zoom(finding: Finding, given: ZoomInput) -> Zoom | None:
    """The first operator that differs, on the way to a finding.

    Args:
        finding: Of an activation, of the gradient of one, or of that of a parameter.
        given: The operators of its step.

    Returns:
        What was found; None where no operators were recorded on the way.
    """
    groups = tuple(by_call(runs) for runs in given.runs)
    noise = [_by_path(runs) for runs in given.noise]
    best: Zoom | None = None
    for rank, micro_step in sorted({key[:2] for key in groups[0]} & {key[:2] for key in groups[1]}):
        if finding.rank not in (None, rank) or finding.micro_step not in (None, micro_step):
            continue
        calls = [{k: v for k, v in group.items() if k[:2] == (rank, micro_step)} for group in groups]
        for is_on_the_way in (_is_close, _is_anywhere):
            keys = [key for key in dict.fromkeys((*calls[0], *calls[1])) if is_on_the_way(finding, key)]
            chosen = [{key: group[key] for key in keys if key in group} for group in calls]
            pairs = [pair for pair in paired_calls(chosen[0], chosen[1]) if _is_before(finding, pair)]
            if not any(pair.baseline for pair in pairs) or not any(pair.candidate for pair in pairs):
                continue
            found = _walked(finding, pairs, given, noise)
            if best is None or _TELLING.index(found.cause) < _TELLING.index(best.cause):
                best = found
            if best.cause in ("operator", "other-operators"):
                break
    return best


_TELLING: tuple[ZoomCause, ...] = ("operator", "other-operators", "other-inputs", "none")
"""Kinds of first differences, those first that tell most."""


def _is_close(finding: Finding, key: CallKey) -> bool:
    """Whether a call of a module is where the difference was made, as a rule.

    What a module returns is made of its own operators, and of those of the modules around it that ran before. The
    gradient that comes back to an output was made in the backward pass of whatever took it.
    """
    _, _, phase, module, call = key
    if finding.phase == "forward":
        own = module == finding.path and call == finding.call
        return phase == "forward" and (own or _is_around(module, finding.path))
    if finding.phase == "grad":
        return phase == "backward" and module == finding.path.rpartition(".")[0]
    return phase == "backward"


def _is_anywhere(finding: Finding, key: CallKey) -> bool:
    """Whether it may be: a backward pass reads what the forward pass has kept for it, wherever that came from."""
    return finding.phase != "forward" or key[2] == "forward"


def _is_around(outer: str, path: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _is_before(finding: Finding, pair: OperatorPair) -> bool:
    """Whether an operator ran before the finding's site was seen. Of the candidate's own that is not known."""
    return finding.phase == "grad" or pair.baseline is None or pair.baseline.order < finding.order


def _by_path(runs: Sequence[OperatorRun]) -> dict[_RunKey, OperatorRun]:
    return {(one.rank, one.micro_step, one.phase, one.path, one.call): one for one in runs}


def _walked(
    finding: Finding, pairs: Sequence[OperatorPair], given: ZoomInput, noise: Sequence[Mapping[_RunKey, OperatorRun]]
) -> Zoom:
    """The walk through the operators, up to the first that differs."""
    explained = finding.floor if math.isfinite(finding.floor) else 0.0
    since: list[OperatorRow] = []  # operators that only one run has, since the last that both have
    alone: list[tuple[OperatorPair, OperatorRow]] = []  # all of them
    rows: list[OperatorRow] = []
    cause: ZoomCause = "none"
    found: _Measured | None = None
    for pair in pairs:
        measured = _measured(pair, noise)
        rows.append(_row(pair, measured, given, explained))
        if measured is None:
            since.append(rows[-1])
            alone.append((pair, rows[-1]))
            continue
        if measured.makes_other:
            cause, found = "operator", measured
        elif measured.is_given_other(explained):
            since = since or _made_by(pair, measured.given_slot, alone)
            cause, found = "other-operators" if since else "other-inputs", measured
        if found is not None:
            break
        explained = max(explained, measured.made if math.isfinite(measured.made) else 0.0)
        since = []
    place = len(rows) - 1
    if found is None and since:
        cause = "other-operators"
    further = [_row(pair, _measured(pair, noise), given, explained) for pair in pairs[place + 1 : place + 1 + BEHIND]]
    at = pairs[place].candidate or pairs[place].baseline
    assert at is not None
    size = None if found is None else _of_interest(found, cause)
    return Zoom(
        step=finding.step, micro_step=at.micro_step, rank=at.rank, phase=finding.phase, path=finding.path,
        slot=finding.slot, module=at.module, cause=cause,
        operator="" if cause == "none" else rows[place].shown.path,
        operator_slot=size.slot if size else "", difference=size.size if size else math.nan,
        floor=size.floor if size else 0.0,
        message=first_says(cause, rows[place], since, size),
        rows=(*rows[max(0, place - BEFORE) :], *further),
        num_operators=sum(pair.baseline is not None and pair.candidate is not None for pair in pairs),
    )  # fmt: skip


def _made_by(pair: OperatorPair, slot: str, alone: Sequence[tuple[OperatorPair, OperatorRow]]) -> list[OperatorRow]:
    """Operators of one run alone that have made what an operator is given: their outputs have the same bits."""
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


def _of_interest(found: _Measured, cause: ZoomCause) -> Size:
    if cause == "operator":
        return Size(slot=found.made_slot, size=found.made, floor=found.made_floor, given=found.given)
    return Size(slot=found.given_slot, size=found.given, floor=found.given_floor, given=found.given)


def _row(pair: OperatorPair, measured: _Measured | None, given: ZoomInput, explained: float) -> OperatorRow:
    both = zip((pair.baseline, pair.candidate), given.described, strict=True)
    baseline, candidate = (None if one is None else _about(one, described) for one, described in both)
    if measured is None:
        message = f"only in the {'candidate' if baseline is None else 'baseline'}"
        return OperatorRow(baseline=baseline, candidate=candidate, message=message)
    message = "its inputs agree, its output does not" if measured.makes_other else "agrees"
    if not measured.makes_other and measured.is_given_other(explained):
        message = "is given other inputs"
    return OperatorRow(
        baseline=baseline, candidate=candidate, given=measured.given, made=measured.made, floor=measured.made_floor,
        message=message,
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


def _measured(pair: OperatorPair, noise: Sequence[Mapping[_RunKey, OperatorRun]]) -> _Measured | None:
    baseline, candidate = pair.baseline, pair.candidate
    if baseline is None or candidate is None:
        return None
    key = (baseline.rank, baseline.micro_step, baseline.phase, baseline.path, baseline.call)
    replicas = [one for runs in noise if (one := runs.get(key)) is not None]
    given = _farthest(baseline.inputs, candidate.inputs, [one.inputs for one in replicas])
    made = _farthest(baseline.outputs, candidate.outputs, [one.outputs for one in replicas])
    return _Measured(
        given=given[0], given_floor=given[1], given_slot=given[2],
        made=made[0], made_floor=made[1], made_slot=made[2],
    )  # fmt: skip


def _farthest(
    baseline: Mapping[str, Entry], candidate: Mapping[str, Entry], replicas: Sequence[Mapping[str, Entry]]
) -> tuple[float, float, str]:
    """Difference, floor and slot of the tensor that is furthest above its floor."""
    sizes = list(_sizes(baseline, candidate, replicas))
    return max(sizes, key=lambda one: _ratio(one[0], one[1]), default=(0.0, 0.0, ""))


def _sizes(
    baseline: Mapping[str, Entry], candidate: Mapping[str, Entry], replicas: Sequence[Mapping[str, Entry]]
) -> Iterator[tuple[float, float, str]]:
    for slot, entry in baseline.items():
        other = candidate.get(slot)
        if other is None or entry.unobserved or other.unobserved:
            continue
        shown = [_size(Pair(baseline=entry, candidate=one[slot])) for one in replicas if slot in one]
        floor = max(rounding(entry.dtype), rounding(other.dtype), SAFETY * max(shown, default=0.0))
        yield _size(Pair(baseline=entry, candidate=other)), floor, slot


def _size(pair: Pair) -> float:
    """Relative L2 difference; inf for whole numbers that differ."""
    if equal_bits(pair):
        return 0.0
    size = difference(pair)
    return math.inf if size is None else size


def _ratio(size: float, floor: float) -> float:
    if size == 0.0 or math.isinf(floor):
        return 0.0
    return size / floor if floor else math.inf


MOST = 12
"""Findings that are taken apart: those that come first."""

_ZOOMED = ("forward", "backward", "grad")


class Zooms:
    """Takes findings apart while the steps of two runs come.

    Args:
        runs: Baseline and candidate.
        rename: Turns the candidate's paths into the baseline's.

    Attributes:
        found: What was found so far.
    """

    def __init__(self, runs: tuple[Run, Run], rename: Rename) -> None:
        self._runs = runs
        self._rename = rename
        self._tried: set[tuple[str, str, str]] = set()
        self._alone: dict[str, None] = {}
        self.found: list[Zoom] = []

    def see(
        self,
        findings: Iterable[Finding],
        operators: tuple[Sequence[Part], Sequence[Part]],
        noise: Sequence[Sequence[Part]],
    ) -> None:
        """Take the findings of a step apart.

        Args:
            findings: In execution order.
            operators: What baseline and candidate have observed of operators in it.
            noise: The same of noise recordings.
        """
        if not all(operators):
            self._alone["baseline" if operators[0] else "candidate"] = None
            return
        wanted = [one for one in findings if one.phase in _ZOOMED and one.kind not in ("missing", "extra")]
        wanted = [one for one in wanted if (one.phase, one.path, one.slot) not in self._tried]
        room = MOST - len(self.found)
        if not wanted or room <= 0:
            return
        given = ZoomInput(
            runs=(operator_runs(operators[0]), operator_runs(operators[1], self._rename)),
            noise=[operator_runs(one) for one in noise],
            described=(_described(self._runs[0]), _described(self._runs[1])),
        )
        for finding in wanted[:room]:
            self._tried.add((finding.phase, finding.path, finding.slot))
            if (found := zoom(finding, given)) is not None:
                self.found.append(found)

    def told(self, first: Finding) -> Finding:
        """The first finding, which then says what was found inside its module, if anything was."""
        for one in self.found:
            seen_at = (one.step, one.phase, one.path, one.slot)
            if seen_at == (first.step, first.phase, first.path, first.slot) and one.cause != "none":
                evidence = {**first.evidence, "operator": one.operator}
                return replace(first, message=f"{first.message} Inside it: {one.message}", evidence=evidence)
        return first

    @property
    def notes(self) -> list[str]:
        """What limits it, one sentence each."""
        return [f"Only the {run} has recorded operators, so none could be compared." for run in self._alone]


def _described(run: Run) -> dict[int, Mapping[str, Any]]:
    return {rank: run.rank_content(rank).get("operators", {}) for rank in run.ranks}
