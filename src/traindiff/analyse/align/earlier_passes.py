"""Passes of a step that a run which goes on from a checkpoint did not make: they belong to the round before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from traindiff.analyse.align.beginnings import same_bits
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.core.observation import ITSELF, SAMPLE

_OF_PASSES = frozenset({"batch", "forward", "loss", "backward"})

_Inputs = Mapping[tuple[str, str, int], MergedSite]
"""Inputs of the model by path, slot and call."""


def without_earlier_passes(step: RunStep, other: RunStep, renames: tuple[Rename, Rename]) -> RunStep | None:
    """The step without the passes that come before those of the other run, which begins in the middle of a step.

    A step of a discriminator begins when it has stepped before: first comes the pass for the generator's step. A run
    that goes on from a checkpoint begins after that one.

    Args:
        step: The step of the run that has recorded what came before.
        other: The same step of the run that begins with it.
        renames: Turn the paths of both into the baseline's.

    Returns:
        The step; None if its last passes are not given the inputs that the other run is given, to the bit.
    """
    own, given = (_inputs(one.table, rename) for one, rename in zip((step, other), renames, strict=True))
    calls, calls_given = (_num_calls(one.table, rename) for one, rename in zip((step, other), renames, strict=True))
    over = {path: calls[path] - calls_given[path] for path, _, _ in own}
    kept = {key: entry for key, entry in own.items() if key[2] >= over[key[0]]}
    later = {(path, slot, call - over[path]): entry for (path, slot, call), entry in kept.items()}
    if step.earlier or other.earlier or not kept or later.keys() != given.keys():
        return None
    begin = min(entry.order for entry in kept.values())
    if any(entry.order >= begin for key, entry in own.items() if key not in kept) or not _passes(step.table, begin):
        return None
    if _passes(other.table, min(entry.order for entry in given.values())):
        return None
    if not all(same_bits(entry, given[key]) for key, entry in later.items()):
        return None
    return replace(step, table=_from(step.table, begin), without_idle=None, layout=None)


def _inputs(table: StepTable, rename: Rename) -> _Inputs:
    return {
        (rename(key.path), key.slot, key.call): entry
        for key, entry in table.items()
        if key[:2] == ("batch", "") and key.path not in ("rng", ITSELF) and not entry.unobserved
    }


def _passes(table: StepTable, begin: int) -> bool:
    """True if there are passes before a place in execution order."""
    return any(key.phase == "forward" and not key.stage and entry.order < begin for key, entry in table.items())


def _num_calls(table: StepTable, rename: Rename) -> Counter[str]:
    """Calls by path, also of those whose inputs the model has computed: these are not recorded."""
    calls = {(key.path, key.call) for key in table if key.phase in ("batch", "forward") and not key.stage}
    return Counter(rename(path) for path, _ in calls)


def _from(table: StepTable, begin: int) -> dict[SiteKey, MergedSite]:
    """The sites of a step without the passes before a place in execution order; calls are numbered anew."""
    calls: dict[tuple[str, str, str, str], set[int]] = {}
    kept = []
    for key, entry in table.items():
        if key.phase not in _OF_PASSES or entry.order >= begin or key.path == ITSELF:
            kept.append((key, entry))
        elif key.phase != "backward":  # that of a call in the step before has a number of that step
            calls.setdefault(_place(key), set()).add(key.call)
    moved = {key: key._replace(call=key.call - len(calls.get(_place(key), ()))) for key, _ in kept}
    return {moved[key]: entry if moved[key] == key else replace(entry, key=moved[key]) for key, entry in kept}


def _place(key: SiteKey) -> tuple[str, str, str, str]:
    """What numbers its calls by itself: a module, forward and backward; the samples of an input."""
    if key.phase == "backward":
        return "forward", "", key.path, ""
    return key.phase, key.stage, key.path, key.slot if key.stage == SAMPLE else ""
