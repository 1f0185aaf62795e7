"""The exact class: what must be equal in two runs so that they compute the same thing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from traindiff.analyse.align.batch_indices import may_count_within
from traindiff.analyse.align.other_values import values_text
from traindiff.analyse.align.padding import padding_of
from traindiff.analyse.align.side import Side, Tables
from traindiff.analyse.findings import Finding, micro_steps_text, ranks_text
from traindiff.analyse.merge.distance import Pair, difference, differing_ranks, equal_bits, is_transposed
from traindiff.analyse.merge.parameters import Groups
from traindiff.analyse.merge.recorded_calls import Sample, Samples
from traindiff.analyse.merge.site import MergedSite, StepTable, finding_at
from traindiff.core.site import label
from traindiff.core.summary import UNIT_ROUNDOFF, finite_count, number

EXACT_KINDS = frozenset({"batch", "random-state", "hyper-parameter", "initial-parameter"})
"""Kinds of findings which say that the runs were not asked to compute the same thing."""


_ROUNDINGS = 16.0
"""Roundings by which two ways to compute a table (of angles, of a window) may be apart."""


def check_batch(pair: Pair, *, step: int, samples: tuple[Samples, Samples] = ({}, {})) -> Finding | None:
    """Compare an input of the root. The same numbers in another precision are the same batch."""
    if equal_bits(pair) or _same_in_another_dtype(pair) or _holds_the_same(pair):
        return None
    baseline, candidate = pair.baseline, pair.candidate
    where = label(baseline.key.path, baseline.key.slot)
    reshaped = is_reshaped(pair)
    permuted, padding = _is_permuted(pair) or reshaped, padding_of(pair)
    site = (baseline.key.path, baseline.key.slot)
    single = [one.get(site, ()) for one in samples] if baseline.dtype == candidate.dtype else [(), ()]
    same = bool(padding) or _are_same_samples(single[0], single[1])
    if padding:
        message = f"The batch differs in its padding: {where} {padding}."
    elif reshaped:
        order = "" if has_same_order(pair) else ", and perhaps in another order"
        message = f"{where} holds the same values in another shape{order}: {_shapes(pair)}."
    elif not permuted and may_count_within(baseline, candidate):
        message = (
            f"The batch differs: {where} holds other numbers. That the runs cut the batch differently does not explain "
            "it: rows with equal numbers in one run have different ones in the other, or the first rows differ."
        )
    elif baseline.shape[1:] != candidate.shape[1:] or (baseline.shape != candidate.shape and not all(single)):
        message = f"The batch differs: {where} has shape {_shapes(pair)}."
    elif detail := samples_message(*single):
        others = detail.startswith(OTHER_SAMPLES)
        message = f"The batch differs: {where} {detail}{values_text(pair, permuted=permuted) if others else ''}"
    elif baseline.dtype != candidate.dtype:
        message = f"The batch differs: {where} is {baseline.dtype} in the baseline, {candidate.dtype} in the candidate."
    elif permuted:
        message = f"The batch differs: {where} holds the same values in another order."
    else:
        message = f"The batch differs: {where} holds other values."
    same_order = reshaped and has_same_order(pair)
    evidence = {
        "permuted": permuted or same,
        "same": same or same_order,
        "reshaped": baseline.shape != candidate.shape and not same_order,
    }
    return finding_at(pair.baseline, step=step, kind="batch", message=message, evidence=evidence)


def _shapes(pair: Pair) -> str:
    return f"{list(pair.baseline.shape)} in the baseline, {list(pair.candidate.shape)} in the candidate"


def has_same_order(pair: Pair) -> bool:
    """True if both tensors hold the same elements one after the other, whatever their shapes."""
    return bool(pair.baseline.summary["fingerprint"] == pair.candidate.summary["fingerprint"])


def is_reshaped(pair: Pair) -> bool:
    """True if both inputs hold the same elements, in tensors of different shapes: axes that are joined or moved."""
    one, other = pair.baseline, pair.candidate
    known = one.exact and other.exact and one.dtype == other.dtype and one.shape != other.shape
    return known and _have_same_elements(pair)


def _are_same_samples(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> bool:
    """True if two runs take the same samples in a step, in any order; zeros at the end of one do not count."""
    held = [Counter(one.fingerprint for one in samples) for samples in (baseline, candidate)]
    return bool(held[0]) and held[0] == held[1]


def _holds_the_same(pair: Pair) -> bool:
    """True if an input whose places are not known holds the same elements in both runs."""
    return not (pair.baseline.placed and pair.candidate.placed) and _have_same_elements(pair)


def _have_same_elements(pair: Pair) -> bool:
    """True if both tensors hold the same elements, in any order."""
    one, other = pair.baseline.summary, pair.candidate.summary
    return all(one[name] == other[name] for name in ("count", "multiset"))


OTHER_SAMPLES = "holds other samples"

_MOST = 8
"""Number of samples or ranks that a message names one by one."""


def samples_message(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> str:
    """How the samples of two different batches match, in words after "input[0]"; empty if samples are unknown."""
    if not baseline or not candidate:
        return ""
    held = [Counter(one.fingerprint for one in samples) for samples in (baseline, candidate)]
    in_order = [one.fingerprint for one in baseline] == [one.fingerprint for one in candidate]
    if in_order and len({one.rank for one in candidate}) == 1:
        return "holds the same samples in the same order, divided or padded otherwise."
    if held[0] == held[1]:
        return f"holds the same samples in another order: {_order(baseline, candidate)}."
    missing, further = held[0] - held[1], held[1] - held[0]
    parts = []
    if repeated := [one for one, times in held[1].items() if times > held[0][one] > 0]:
        who = next(one for one in candidate if one.fingerprint == repeated[0])
        several = f"{len(repeated)} samples come more than once" if len(repeated) > 1 else ""
        parts.append(f"{several or f'one sample comes {held[1][repeated[0]]} times'}, first at {_where(who)}")
    if fresh := [one for one in candidate if one.fingerprint in further and not held[0][one.fingerprint]]:
        number = f"{len(fresh)} of its {len(candidate)} samples {'is' if len(fresh) == 1 else 'are'}"
        parts.append(f"{number} none of the baseline's, first {_where(fresh[0])}")
    elif missing:
        lost = [one for one in baseline if one.fingerprint in missing]
        first = _whole_micro_steps(lost, baseline) or f"first {_where(lost[0])}"
        number = f"{missing.total()} of the baseline's {len(baseline)} samples"
        parts.append(f"{number} {'is' if missing.total() == 1 else 'are'} missing, {first}")
    return f"{OTHER_SAMPLES}: {', and '.join(parts)}.{_only_on(baseline, candidate)}"


def _whole_micro_steps(lost: Sequence[Sample], baseline: Sequence[Sample]) -> str:
    """`all of micro-step 2`, if the samples that are lost are all those of some micro-steps."""
    steps = sorted({one.micro_step for one in lost})
    every = sum(one.micro_step in steps for one in baseline)
    several = len(steps) < len({one.micro_step for one in baseline})
    return f"all of {micro_steps_text(steps)}" if several and every == len(lost) else ""


def _only_on(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> str:
    """A sentence that names the ranks with other samples, if some ranks have the baseline's."""
    if len(baseline) != len(candidate):
        return ""
    pairs = zip(baseline, candidate, strict=True)
    apart = {actual.rank for expected, actual in pairs if expected.fingerprint != actual.fingerprint}
    if not apart < {one.rank for one in candidate}:
        return ""
    return f" Only what {ranks_text(sorted(apart), capital=False)} holds differs."


def _order(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> str:
    """Positions of the candidate's samples in the baseline's batch."""
    places: dict[int, list[int]] = {}
    for place, one in enumerate(baseline):
        places.setdefault(one.fingerprint, []).append(place)
    by_rank: dict[int, list[int]] = {}
    for one in candidate:
        by_rank.setdefault(one.rank, []).append(places[one.fingerprint].pop(0))
    size = len(by_rank)
    if size == 1:
        return f"the baseline's {_numbers(next(iter(by_rank.values())))}"
    held = [numbers for _, numbers in sorted(by_rank.items())]
    ranks = [f"{ranks_text([rank], capital=False)} has {_numbers(by_rank[rank])}" for rank in sorted(by_rank)]
    more = f", and {size - _MOST} more ranks" if size > _MOST else ""
    return f"of the baseline's, {', '.join(ranks[:_MOST])}{more}{_advice(held, candidate)}"


def _advice(held: Sequence[Sequence[int]], candidate: Sequence[Sample]) -> str:
    """How ranks share samples, with the setting of `record` that brings them into the baseline's order, if any does.

    The blocks of several micro-steps have no such setting: each micro-step takes a part of each rank's block.
    """
    count = len(candidate)
    if all(list(numbers) == list(range(place, count, len(held))) for place, numbers in enumerate(held)):
        return ', in turn, as a distributed sampler gives them; record it with sample_order="interleaved"'
    if [place for places in held for place in places] == list(range(count)):
        in_parts = len({one.micro_step for one in candidate}) > 1
        return ", one block each" if in_parts else ', one block each; record it with sample_order="blocks"'
    return ""


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_MOST])) + (", ..." if len(numbers) > _MOST else "")


def _where(sample: Sample) -> str:
    return f"number {sample.place} of rank {sample.rank} in micro-step {sample.micro_step}"


def check_initial_parameter(
    pair: Pair, *, step: int, steps_before: int = 0, may_be_drift: bool = False
) -> Finding | None:
    """Compare a parameter as the first recorded step found it. Another precision or rounding is not another value.

    Args:
        pair: The parameter.
        step: The step.
        steps_before: Number of steps of both runs before it, which were not compared.
        may_be_drift: Whether these may be why the parameters of the runs differ.
    """
    if equal_bits(pair) or _same_in_another_dtype(pair):
        return None
    baseline, candidate = pair.baseline, pair.candidate
    path, permuted = baseline.key.path, False
    if is_transposed(pair) and (permuted := _is_permuted(pair)):
        transposed = f"{path} starts with the same values, transposed: {_shapes(pair)}."
        message = f"{transposed} What depends on their order is not compared."
    elif baseline.shape != candidate.shape:
        message = (
            f"{path} has shape {list(baseline.shape)} in the baseline and {list(candidate.shape)} in the candidate: "
            "another model, or another layout of the same one?"
        )
    elif permuted := _is_permuted(pair):
        message = f"{path} starts with the same values in another order (a converted checkpoint, permuted?)."
    elif may_be_drift or starts_rounded(pair):
        return None
    elif steps_before:
        message = (
            f"{path} has other values at step {step}, the first that is compared: another seed, initialization or "
            f"checkpoint, or did the runs part in the steps before it?"
        )
    else:
        message = f"{path} starts with other values: another seed, initialization or checkpoint?"
    if ranks := differing_ranks(pair, 0.0):
        message += f" Only what {ranks_text(ranks, capital=False)} holds differs."
    return finding_at(
        pair.baseline, step=step, kind="initial-parameter", message=message, evidence={"permuted": permuted}
    )


def other_parameters(pairs: Iterable[Pair]) -> set[str]:
    """Parameters that start with other values by more than rounding, judged by the first step."""
    beginning = (pair for pair in pairs if pair.baseline.key[:2] == ("param", "before"))
    same = (equal_bits, _same_in_another_dtype, starts_rounded)
    return {
        pair.baseline.key.path
        for pair in beginning
        if pair.baseline.key.slot == "value" and not any(are_same(pair) for are_same in same)
    }


def starts_rounded(pair: Pair) -> bool:
    """True if a parameter starts with values that rounding parts, as where they are computed from the first batch.

    Ranks that should hold the same do. In short dtypes it cannot be told: few roundings are as large as a fault.
    """
    one, other = pair.baseline, pair.candidate
    alike = (one.dtype, one.shape) == (other.dtype, other.shape) and not max(one.spread, other.spread)
    return alike and one.dtype in ("float32", "float64") and _is_rounded_otherwise(pair)


def other_buffers(pairs: Iterable[Pair]) -> list[str]:
    """Buffers that start with other values by more than rounding, judged by the first step."""
    return [
        pair.baseline.key.path
        for pair in pairs
        if pair.baseline.key[:2] == ("param", "before")
        and pair.baseline.key.slot == "buffer"
        and not _may_be_the_same(pair)
    ]


class ConstantBuffers:
    """Knows which buffers a baseline leaves as they are, and its candidate changes."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, ...]] = {}  # fingerprints of both runs, by path, after the latest step

    def changed(self, pairs: Iterable[Pair]) -> list[str]:
        """Buffers that the candidate alone has changed since the step that was seen before; steps come in order."""
        found = []
        for pair in pairs:
            key = pair.baseline.key
            if (key.phase, key.slot) != ("param", "buffer") or key.stage not in ("", "before"):
                continue
            now = tuple(int(one.summary["fingerprint"]) for one in (pair.baseline, pair.candidate))
            before = self._held.get(key.path, ())
            if before and not key.stage and before[0] == now[0] and before[1] != now[1] and not _may_be_the_same(pair):
                found.append(key.path)
            self._held[key.path] = now
        return found


def _may_be_the_same(pair: Pair) -> bool:
    return equal_bits(pair) or _same_in_another_dtype(pair) or _is_rounded_otherwise(pair)


def _is_rounded_otherwise(pair: Pair) -> bool:
    """True if two tensors may be the same function of the same numbers, computed in another way."""
    size = difference(pair)
    u = max(UNIT_ROUNDOFF.get(one.dtype, 0.0) for one in (pair.baseline, pair.candidate))
    return size is not None and size <= _ROUNDINGS * u


def permuted_paths(pairs: Iterable[Pair]) -> set[str]:
    """Parameters and buffers that may be in another order in the candidate, judged by the first step.

    These hold the same values in another order. If there are any, parameters that hold a single value count too: norms
    and their statistics start so, and any order of them is the same.
    """
    beginning = [pair for pair in pairs if pair.baseline.key[:2] == ("param", "before")]
    permuted = {pair.baseline.key.path for pair in beginning if not equal_bits(pair) and _is_permuted(pair)}
    constant = {pair.baseline.key.path for pair in beginning if _is_constant(pair.baseline)}
    return permuted | constant if permuted else set()


def _is_constant(entry: MergedSite) -> bool:
    several = len(entry.shape) > 0 and int(finite_count(entry.summary)) > 1
    return several and float(entry.summary["minimum"]) == float(entry.summary["maximum"])


def _is_permuted(pair: Pair) -> bool:
    baseline, candidate = pair.baseline, pair.candidate
    same = baseline.dtype == candidate.dtype and (baseline.shape == candidate.shape or is_transposed(pair))
    return bool(same and baseline.summary["multiset"] == candidate.summary["multiset"])


def _same_in_another_dtype(pair: Pair) -> bool:
    """True if two tensors of different dtypes hold the same numbers, as far as both dtypes can."""
    baseline, candidate = pair.baseline, pair.candidate
    known = (baseline.exact and candidate.exact) or not (baseline.placed and candidate.placed)
    if baseline.dtype == candidate.dtype or baseline.shape != candidate.shape or not known:
        return False
    size = difference(pair)
    if baseline.dtype not in UNIT_ROUNDOFF and candidate.dtype not in UNIT_ROUNDOFF:
        # Whole numbers; below 2^31 their bits do not depend on the width.
        return bool(baseline.summary["fingerprint"] == candidate.summary["fingerprint"])
    return size is not None and size <= rounding_apart(pair)


def rounding_apart(pair: Pair) -> float:
    """The largest difference between the same numbers in two dtypes; 0 for one dtype, and for whole numbers.

    The sketch's estimate of a distance is good to a factor of 1.5 in all but one case in 10,000.
    """
    dtypes = {pair.baseline.dtype, pair.candidate.dtype}
    return 1.5 * max(UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes) if len(dtypes) > 1 else 0.0


def check_random_state(baseline: StepTable, candidate: StepTable, *, step: int) -> Iterator[Finding]:
    """Compare the random generators that a forward pass draws from, and the number of passes that do."""
    drawing = [_drawing(table) for table in (baseline, candidate)]
    for key, entry in baseline.items():
        other = candidate.get(key)
        if key not in drawing[0] and key not in drawing[1]:
            continue
        if other is not None and not equal_bits(Pair(baseline=entry, candidate=other)):
            message = (
                f"torch's {key.slot} random state differs before the forward pass, which draws from it: "
                "masks and samples cannot be the same."
            )
            yield finding_at(entry, step=step, kind="random-state", message=message)
            return
    for slot in sorted({key.slot for key in drawing[0]}):
        passes = [[entry for key, entry in one.items() if key.slot == slot] for one in drawing]
        if all(passes) and len(passes[0]) != len(passes[1]):
            message = (
                f"{len(passes[1])} forward passes of the candidate draw from torch's {slot} generator in a step, and "
                f"{len(passes[0])} of the baseline: split like this, masks and samples cannot be the same. "
                "Compare without dropout, or with masks that depend on the sample."
            )
            yield finding_at(passes[0][0], step=step, kind="random-state", message=message)
            return


def draws(table: StepTable) -> bool:
    """True if a forward pass of the step draws random numbers."""
    return bool(_drawing(table))


def _drawing(table: StepTable) -> StepTable:
    """The states of generators before forward passes that draw from them."""
    return {
        key: entry
        for key, entry in table.items()
        if key.path == "rng"
        and key.stage == "before"
        and (after := table.get(key._replace(stage="after"))) is not None
        and after.summary["fingerprint"] != entry.summary["fingerprint"]
    }


Settings = Mapping[tuple[str, str], tuple[float, MergedSite]]
"""Value of each setting of an optimizer, and its entry, by the path of the parameter and the setting's name."""


_SCHEDULED = ("lr", "betas", "momentum", "weight_decay")
"""Settings that trainings change while they run."""


class ChosenSettings:
    """Leaves out numbers that an optimizer computes and keeps among its settings, as Prodigy does its step size.

    A number that changes during the run is one, unless trainings schedule it. The updates that follow from it are
    judged.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], float] = {}

    def of(self, settings: Settings) -> Settings:
        """The settings of a step that the training has chosen; steps must be given in order."""
        for what, (value, _) in settings.items():
            self._first.setdefault(what, value)
        return {
            what: (value, entry)
            for what, (value, entry) in settings.items()
            if what[1].partition("[")[0] in _SCHEDULED or _same_setting(value, self._first[what])
        }


class SettingChanges:
    """Reports each difference between the optimizer settings of two runs once, when it is first seen."""

    def __init__(self) -> None:
        self._told: set[tuple[str, float, float]] = set()
        self._before: Mapping[tuple[str, str], float] = {}  # the baseline's, when they were last looked at
        self._looked_at: Any = None  # settings of both sides in the compared step before, by group
        self._step = 0  # the compared step before
        self._chosen = ChosenSettings()

    def findings(self, sides: tuple[Side, Side], tables: Tables, *, step: int) -> list[Finding]:
        """Settings that differ in a step and did not differ so before."""
        follows, self._step = step <= self._step + 1, step
        looked_at = [(side.groups, _by_group(table)) for table, side in zip(tables, sides, strict=True)]
        if looked_at == self._looked_at:
            return []  # what differs was told in the step before
        self._looked_at = looked_at
        baseline, candidate = (settings_of(table, side.groups) for table, side in zip(tables, sides, strict=True))
        fresh = []
        for finding in check_hyper_parameters(self._chosen.of(baseline), candidate, step=step):
            change = (finding.slot, finding.evidence["baseline"], finding.evidence["candidate"])
            if change not in self._told:
                self._told.add(change)
                fresh.append(_one_step_late(finding, self._before) if follows else finding)
        self._before = {what: value for what, (value, _) in baseline.items()}
        return fresh


def check_hyper_parameters(baseline: Settings, candidate: Settings, *, step: int) -> Iterator[Finding]:
    """Compare learning rate and other settings of the optimizers, parameter by parameter."""
    differing: dict[tuple[str, float, float], tuple[MergedSite, list[str]]] = {}
    for (path, slot), (value, entry) in baseline.items():
        if (path, slot) in candidate and not _same_setting(value, other := candidate[path, slot][0]):
            differing.setdefault((slot, value, other), (entry, []))[1].append(path)
    for (slot, before, after), (entry, paths) in differing.items():
        named = ", ".join(paths[:2]) + (", ..." if len(paths) > 2 else "")
        among = named if len(paths) == 1 else f"{len(paths)} parameters ({named})"
        digits = 6 if f"{before:g}" != f"{after:g}" else 9
        values = f"{before:.{digits}g} in the baseline and {after:.{digits}g} in the candidate"
        message = f"{slot} is {values}, for {among}."
        evidence = {"baseline": before, "candidate": after, "parameters": len(paths), "paths": paths}
        yield finding_at(entry, step=step, kind="hyper-parameter", message=message, evidence=evidence)


def _same_setting(baseline: float, candidate: float) -> bool:
    """True if two values of a setting agree, within what a schedule computed in float32 can tell."""
    return math.isclose(baseline, candidate, rel_tol=4.0 * UNIT_ROUNDOFF["float32"]) or (
        math.isnan(baseline) and math.isnan(candidate)
    )


def _by_group(table: StepTable) -> list[tuple[Any, str, str, float]]:
    """The settings of a step, as they are recorded."""
    return [
        (key.group, key.path, key.slot, number(entry.summary)) for key, entry in table.items() if key.group is not None
    ]


def settings_of(table: StepTable, groups: Groups) -> Settings:
    """The settings of a step; by group if its parameters are unknown."""
    found: dict[tuple[str, str], tuple[float, MergedSite]] = {}
    for key, entry in table.items():
        if key.group is None:
            continue
        name, index = key.group
        members, value = groups.get(name, []), number(entry.summary)
        for path in members[index] if index < len(members) else [key.path]:
            found[path, key.slot] = (value, entry)
    return found


def _one_step_late(finding: Finding, before: Mapping[tuple[str, str], float]) -> Finding:
    """The finding, with a remark if the candidate's setting is the baseline's of the step before."""
    held = before.get((finding.evidence["paths"][0], finding.slot))
    if held is None or not _same_setting(held, finding.evidence["candidate"]):
        return finding
    message = finding.message + " That is what the baseline had in the step before: one step late?"
    return replace(finding, message=message, evidence={**finding.evidence, "late": True})
