"""The exact class: what must be equal to the bit for two runs to be asked the same question."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from traindiff.comparison.alignment import Pair
from traindiff.comparison.floors import UNIT_ROUNDOFF
from traindiff.comparison.measure import difference, equal_bits
from traindiff.comparison.ranks import differing_ranks, name_ranks
from traindiff.comparison.samples import Samples, says_of_samples
from traindiff.comparison.step_table import Entry, Key
from traindiff.comparison.verdict import Finding
from traindiff.site import label
from traindiff.summary import finite_count

EXACT_KINDS = frozenset({"batch", "random-state", "hyper-parameter", "initial-parameter"})
"""Kinds of finding that mean "these runs were not asked to compute the same thing"."""

Groups = Mapping[str, list[list[str]]]
"""Parameters of each group of each optimizer, by the optimizer's name; from `rank.json`."""


def exact_finding(pair: Pair, *, step: int, kind: str, says: str, evidence: Mapping[str, Any]) -> Finding:
    """A finding of the exact class, at a pair."""
    key = pair.baseline.key
    return Finding(
        step=step, micro_step=None, rank=None, phase=key.phase, stage=key.stage, path=key.path, slot=key.slot,
        call=key.call, order=pair.baseline.order, kind=kind, difference=float("inf"), floor=0.0, says=says,
        evidence=evidence,
    )  # fmt: skip


def check_batch(pair: Pair, *, step: int, samples: tuple[Samples, Samples] = ({}, {})) -> Finding | None:
    """Compare an input of the root. The same numbers in another precision are the same batch.

    Args:
        pair: The input.
        step: Number of the step.
        samples: What both runs have recorded of single samples.
    """
    if equal_bits(pair) or _same_in_another_dtype(pair):
        return None
    left, right = pair.baseline, pair.candidate
    where = label(left.key.path, left.key.slot)
    permuted = _is_permuted(pair)
    single = (one.get(left.key.slot, ()) for one in samples) if left.dtype == right.dtype else ((), ())
    if detail := says_of_samples(*single):
        says = f"The batch differs: {where} {detail}"
    elif left.shape != right.shape:
        shapes = f"{list(left.shape)} in the baseline, {list(right.shape)} in the candidate"
        says = f"The batch differs: {where} has shape {shapes}."
    elif left.dtype != right.dtype:
        says = f"The batch differs: {where} is {left.dtype} in the baseline, {right.dtype} in the candidate."
    elif permuted:
        says = f"The batch differs: {where} holds the same values in another order."
    else:
        says = f"The batch differs: {where} holds other values."
    return exact_finding(pair, step=step, kind="batch", says=says, evidence={"permuted": permuted})


def check_initial_parameter(pair: Pair, *, step: int) -> Finding | None:
    """Compare a parameter as the first recorded step found it; another precision is not another value."""
    if equal_bits(pair) or _same_in_another_dtype(pair):
        return None
    left, right = pair.baseline, pair.candidate
    path, permuted = left.key.path, False
    if left.shape != right.shape:
        says = (
            f"{path} has shape {list(left.shape)} in the baseline and {list(right.shape)} in the candidate: "
            "another model, or another layout of the same one?"
        )
    elif permuted := _is_permuted(pair):
        says = f"{path} starts with the same values in another order (a converted checkpoint, permuted?)."
    else:
        says = f"{path} starts with other values: another seed, initialisation or checkpoint?"
    if ranks := differing_ranks(pair, 0.0):
        says += f" Only what {name_ranks(ranks, capital=False)} holds differs."
    return exact_finding(pair, step=step, kind="initial-parameter", says=says, evidence={"permuted": permuted})


def permuted_paths(pairs: Iterable[Pair]) -> set[str]:
    """Parameters and buffers that may be in another order in the candidate, going by what the first step found.

    Those that hold the same values in another order; and where there are any, those that hold one value only, as
    norms and their statistics do at first: any order of it is the same.
    """
    beginning = [pair for pair in pairs if pair.baseline.key[:2] == ("param", "before")]
    permuted = {pair.baseline.key.path for pair in beginning if not equal_bits(pair) and _is_permuted(pair)}
    constant = {pair.baseline.key.path for pair in beginning if _is_constant(pair.baseline)}
    return permuted | constant if permuted else set()


def _is_constant(entry: Entry) -> bool:
    several = len(entry.shape) > 0 and int(finite_count(entry.summary)) > 1
    return several and float(entry.summary["minimum"]) == float(entry.summary["maximum"])


def _is_permuted(pair: Pair) -> bool:
    left, right = pair.baseline, pair.candidate
    same = left.dtype == right.dtype and left.shape == right.shape
    return bool(same and left.summary["multiset"] == right.summary["multiset"])


def _same_in_another_dtype(pair: Pair) -> bool:
    """Whether two tensors of different dtypes hold the same numbers, as far as both can hold them."""
    left, right = pair.baseline, pair.candidate
    if left.dtype == right.dtype or left.shape != right.shape or not (left.exact and right.exact):
        return False
    size, units = difference(pair), [UNIT_ROUNDOFF.get(one.dtype) for one in (left, right)]
    if units[0] is None and units[1] is None:  # whole numbers; below 2^31 their bits do not depend on the width
        return bool(left.summary["fingerprint"] == right.summary["fingerprint"])
    # The sketch's estimate of a distance is good to a factor of 1.5 in all but one case in 10,000.
    return size is not None and size <= 1.5 * max(unit or 0.0 for unit in units)


def check_random_state(
    baseline: Mapping[Key, Entry], candidate: Mapping[Key, Entry], *, step: int
) -> Iterator[Finding]:
    """Compare the state of random generators from which a forward pass draws, and how many passes do."""
    drawn = _drawn(baseline) | _drawn(candidate)
    for key, entry in baseline.items():
        other = candidate.get(key)
        if key.path != "rng" or key.stage != "before" or key.slot not in drawn:
            continue
        if other is not None and not equal_bits(Pair(baseline=entry, candidate=other)):
            says = (
                f"torch's {key.slot} random state differs before the forward pass, which draws from it: "
                "masks and samples cannot be the same."
            )
            pair = Pair(baseline=entry, candidate=other)
            yield exact_finding(pair, step=step, kind="random-state", says=says, evidence={})
            return
    for slot in sorted(_drawn(baseline) & _drawn(candidate)):
        passes = [
            [entry for key, entry in table.items() if key.path == "rng" and key.stage == "before" and key.slot == slot]
            for table in (baseline, candidate)
        ]
        if all(passes) and len(passes[0]) != len(passes[1]):
            says = (
                f"{len(passes[1])} forward passes of the candidate draw from torch's {slot} generator in a step, and "
                f"{len(passes[0])} of the baseline: split like this, masks and samples cannot be the same. "
                "Compare without dropout, or with masks that depend on the sample."
            )
            pair = Pair(baseline=passes[0][0], candidate=passes[1][0])
            yield exact_finding(pair, step=step, kind="random-state", says=says, evidence={})
            return


def _drawn(table: Mapping[Key, Entry]) -> set[str]:
    """Generators whose state a forward pass changed."""
    return {
        key.slot
        for key, entry in table.items()
        if key.path == "rng"
        and key.stage == "before"
        and (after := table.get(key._replace(stage="after"))) is not None
        and after.summary["fingerprint"] != entry.summary["fingerprint"]
    }


def one_step_late(finding: Finding, before: Mapping[tuple[str, str], tuple[float, Entry]]) -> Finding:
    """The finding of a setting, which says so if the candidate's is what the baseline had in the step before.

    Args:
        finding: From `check_hyper_parameters`.
        before: The baseline's settings in the step before.
    """
    held = before.get((finding.evidence["paths"][0], finding.slot))
    if held is None or not _same_setting(held[0], finding.evidence["candidate"]):
        return finding
    says = finding.says + " That is what the baseline had in the step before: one step late?"
    return replace(finding, says=says, evidence={**finding.evidence, "late": True})


def check_hyper_parameters(
    baseline: tuple[Mapping[Key, Entry], Groups], candidate: tuple[Mapping[Key, Entry], Groups], *, step: int
) -> Iterator[Finding]:
    """Compare learning rate and other settings of the optimizers, parameter by parameter."""
    left, right = settings_of(*baseline), settings_of(*candidate)
    differing: dict[tuple[str, float, float], list[str]] = {}
    entries: dict[tuple[str, float, float], Pair] = {}
    for (path, slot), (value, entry) in left.items():
        if (path, slot) in right and not _same_setting(value, (found := right[path, slot])[0]):
            change = (slot, value, found[0])
            differing.setdefault(change, []).append(path)
            entries.setdefault(change, Pair(baseline=entry, candidate=found[1]))
    for (slot, before, after), paths in differing.items():
        among = paths[0] if len(paths) == 1 else f"{len(paths)} parameters ({', '.join(paths[:2])}, ...)"
        digits = 6 if f"{before:g}" != f"{after:g}" else 9
        values = f"{before:.{digits}g} in the baseline and {after:.{digits}g} in the candidate"
        says = f"{slot} is {values}, for {among}."
        evidence = {"baseline": before, "candidate": after, "parameters": len(paths), "paths": paths}
        pair = entries[slot, before, after]
        yield exact_finding(pair, step=step, kind="hyper-parameter", says=says, evidence=evidence)


def _same_setting(baseline: float, candidate: float) -> bool:
    """Whether a setting has one value, as far as a schedule computed in float32 can tell."""
    return math.isclose(baseline, candidate, rel_tol=4.0 * UNIT_ROUNDOFF["float32"]) or (
        math.isnan(baseline) and math.isnan(candidate)
    )


def settings_of(table: Mapping[Key, Entry], groups: Groups) -> dict[tuple[str, str], tuple[float, Entry]]:
    """Value of each setting by parameter (by group, where its parameters are not known)."""
    found: dict[tuple[str, str], tuple[float, Entry]] = {}
    for key, entry in table.items():
        if key.group is None:
            continue
        name, index = key.group
        members = groups.get(name, [])
        for path in members[index] if index < len(members) else [key.path]:
            found[path, key.slot] = (float(entry.summary["sum"]), entry)
    return found
