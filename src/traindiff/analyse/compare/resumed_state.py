"""The state of a training before its first step after loading, against that which was saved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traindiff.analyse.align.beginnings import same_bits
from traindiff.analyse.compare.held_objects import Objects, differ_in, object_differences
from traindiff.analyse.compare.resumption import StateDifference
from traindiff.analyse.findings import more_text
from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.merge.site import MergedSite
from traindiff.core.summary import number
from traindiff.storage import open_recording

Site = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a training between two steps.

    Attributes:
        parameters: By path.
        optimizer: What the optimizers keep of a parameter, by path and slot.
        settings: The settings of their groups, by path and slot.
        objects: Everything else, for each rank.
    """

    parameters: Mapping[str, MergedSite]
    optimizer: Mapping[Site, MergedSite]
    settings: Mapping[Site, float]
    objects: Sequence[Objects]


def read_state(path: Path, files: Sequence[Path]) -> State:
    """Read a state that the stages of a resume have kept.

    Args:
        path: Its recording.
        files: By rank: the file with everything else.
    """
    parameters: dict[str, MergedSite] = {}
    optimizer: dict[Site, MergedSite] = {}
    settings: dict[Site, float] = {}
    for step in run_steps(open_recording(str(path))):
        for key, entry in step.table.items():
            if entry.unobserved:
                continue
            if key.phase == "param" and key.slot == "value":
                parameters[key.path] = entry
            elif key.group:
                settings[key.path, key.slot] = number(entry.summary)
            elif key.phase == "optimizer":
                optimizer[key.path, key.slot] = entry
    objects: list[Objects] = []
    for file in files:
        leaves = json.loads(file.read_text())
        objects.append({(one["object"], one["leaf"]): one for one in leaves})
    return State(parameters=parameters, optimizer=optimizer, settings=settings, objects=objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Differences of a state, and notes on what was not judged."""

    differences: tuple[StateDifference, ...]
    notes: tuple[str, ...]


def compare_states(states: Mapping[str, State], *, at: int, steps_agree: bool, same_bits_after: bool) -> Told:
    """Everything that was not restored.

    Args:
        states: `saved` and `after-saving`, the state before and after saving; `fresh` and `resumed`, before and after
            loading; `whole` and `end`, of the training that never stopped, at the same step and at its end.
        at: Number of the first step after loading.
        steps_agree: Whether the steps after loading agree with those without a stop. A setting of the optimizer is
            compared in each of them, so that one which differs before them is then set anew by the training.
        same_bits_after: Whether they have the same bits.
    """
    whole, saved, after = states["whole"], states["saved"], states["after-saving"]
    fresh, resumed = states["fresh"], states["resumed"]
    notes = []
    if not _all_same(whole.parameters, saved.parameters):
        notes.append(
            f"The training does not repeat itself: after {at} steps, two runs of it hold other parameters. What was "
            "restored is judged, and the steps after it are compared with those of another run."
        )
    found = [*_by_saving(saved, after), *_parameters(saved, fresh, resumed)]
    found += _optimizer_state(saved, resumed)
    settings = [*_settings(saved, fresh, resumed, at=at)]
    if steps_agree:
        notes += [f"{one.message} The steps after it agree: the training sets it anew." for one in settings]
    else:
        found += settings
    more, further = object_differences(
        saved.objects, fresh.objects, resumed.objects, whole=(whole.objects, states["end"].objects),
        steps_agree=steps_agree, same_bits=same_bits_after,
    )  # fmt: skip
    return Told(differences=(*found, *more), notes=(*notes, *further))


def _all_same(one: Mapping[Any, MergedSite], other: Mapping[Any, MergedSite]) -> bool:
    return one.keys() == other.keys() and all(same_bits(entry, other[key]) for key, entry in one.items())


def _by_saving(saved: State, after: State) -> Iterator[StateDifference]:
    changed = [path for path, entry in saved.parameters.items() if not _same(entry, after.parameters.get(path))]
    if changed:
        message = f"Saving changes the training: {among(changed, len(saved.parameters))} had other values after it."
        yield StateDifference(what="saving", sites=tuple(changed), message=message, evidence={})
    others = [path for (path, _), entry in saved.optimizer.items() if not _same(entry, after.optimizer.get((path, _)))]
    if others:
        paths = list(dict.fromkeys(others))
        message = f"Saving changes the training: the optimizer's state of {among(paths)} was another one after it."
        yield StateDifference(what="saving", sites=tuple(paths), message=message, evidence={})


def _same(one: MergedSite, other: MergedSite | None) -> bool:
    return other is not None and same_bits(one, other)


def among(paths: Sequence[str], count: int | None = None, what: str = "parameter") -> str:
    """`3 of 148 parameters (a, b, ...)`, or the path of a single one."""
    if len(paths) == 1:
        return paths[0]
    named = ", ".join(paths[:2]) + (", ..." if len(paths) > 2 else "")
    if count is None or count == len(paths):
        every = "all " if count is not None else ""
        return f"{every}{len(paths)} {what}s ({named})"
    return f"{len(paths)} of {count} {what}s ({named})"


def _parameters(saved: State, fresh: State, resumed: State) -> Iterator[StateDifference]:
    there = resumed.parameters
    groups: dict[str, list[str]] = {}
    for path, entry in saved.parameters.items():
        other = there.get(path)
        if not _same(entry, other):
            why = _why(entry, other)
            if why in ("zero", "other") and _same(fresh.parameters.get(path, entry), other):
                why = "fresh"
            groups.setdefault(why, []).append(path)
    for why, paths in groups.items():
        message = _of_parameters(why, paths, len(saved.parameters), saved.parameters[paths[0]], there.get(paths[0]))
        yield StateDifference(
            what="parameter", sites=tuple(paths), message=message, evidence={"of": len(saved.parameters)}
        )  # fmt: skip
    if more := [path for path in there if path not in saved.parameters]:
        message = f"{among(more)} {_was(more)} not saved: the training did not have {_them(more)}."
        yield StateDifference(what="parameter", sites=tuple(more), message=message, evidence={})


def _of_parameters(why: str, paths: Sequence[str], count: int, own: MergedSite, other: MergedSite | None) -> str:
    """A sentence about parameters that are not as they were saved, with the first of them as the example."""
    which, was, has = among(paths, count), _was(paths), "has" if len(paths) == 1 else "have"
    if other is None:
        return f"{which} {was} saved, and the training does not have {_them(paths)} after loading."
    if why == "fresh":
        return f"{which} {was} not loaded: what the recipe made is still there."
    if why == "shape":
        return f"{which} {was} saved in another shape: {paths[0]} has {list(other.shape)}, and had {list(own.shape)}."
    if why == "dtype":
        return f"{which} {was} saved in another dtype: {paths[0]} is {other.dtype}, and was {own.dtype}."
    if why == "zero":
        return f"{which} {has} only zeros, and other values {was} saved."
    return f"{which} {has} other values than {was} saved{_by(own, other)}."


def _them(paths: Sequence[str]) -> str:
    return "it" if len(paths) == 1 else "them"


def _was(paths: Sequence[str]) -> str:
    return "was" if len(paths) == 1 else "were"


def _by(own: MergedSite, other: MergedSite | None) -> str:
    size = None if other is None else difference(Pair(baseline=own, candidate=other))
    return "" if not size else f": the first differs by {size:.2g} of its size (relative L2)"


def _optimizer_state(saved: State, resumed: State) -> Iterator[StateDifference]:
    if saved.optimizer and not resumed.optimizer:
        message = f"The optimizer has no state ({_slots(saved.optimizer)}): it was not loaded."
        yield StateDifference(
            what="optimizer-state", sites=_paths(saved.optimizer), message=message, evidence={}
        )  # fmt: skip
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for (path, slot), entry in saved.optimizer.items():
        other = resumed.optimizer.get((path, slot))
        if not _same(entry, other):
            why = _why(entry, other)
            if other is not None and slot == "step" and not entry.shape:
                why = f"step {number(other.summary)} {number(entry.summary)}"
            groups.setdefault((slot, why), []).append(path)
    for (slot, why), paths in groups.items():
        which = among(paths, sum(one == slot for _, one in saved.optimizer))
        message = _of_state(slot, why, which, saved.optimizer[paths[0], slot], resumed.optimizer.get((paths[0], slot)))
        yield StateDifference(what="optimizer-state", sites=tuple(paths), message=message, evidence={"slot": slot})
    if more := [site for site in resumed.optimizer if site not in saved.optimizer]:
        message = f"{_slots(more)} is there for {among(_paths(more))}, and was not when the training was saved."
        yield StateDifference(what="optimizer-state", sites=_paths(more), message=message, evidence={})


def _paths(sites: Iterable[Site]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for path, _ in sites))


def _slots(sites: Iterable[Site]) -> str:
    return ", ".join(dict.fromkeys(slot for _, slot in sites))


def _of_state(slot: str, why: str, which: str, own: MergedSite, other: MergedSite | None) -> str:
    """A sentence about the optimizer's state of some parameters, with the first of them as the example."""
    if other is None:
        return f"{slot} is not there for {which}: the optimizer's state was not loaded."
    if why.startswith("step"):
        return f"The optimizer's step is {number(other.summary):g} for {which}; it was {number(own.summary):g}."
    if why == "shape":
        return f"{slot} has another shape for {which}: {list(other.shape)}; it was {list(own.shape)}."
    if why == "dtype":
        return f"{slot} is {other.dtype} for {which}; it was {own.dtype}."
    if why == "zero":
        return f"{slot} is zero for {which}: the optimizer's state was not loaded."
    return f"{slot} has other values than were saved, for {which}{_by(own, other)}."


def _why(own: MergedSite, other: MergedSite | None) -> str:
    """In which way a tensor is not as it was saved."""
    if other is None:
        return "absent"
    if own.shape != other.shape:
        return "shape"
    if own.dtype != other.dtype:
        return "dtype"
    return "zero" if int(other.summary["zero"]) == int(other.summary["count"]) else "other"


_WORDS = {"lr": "learning rate"}


def _settings(saved: State, fresh: State, resumed: State, *, at: int) -> Iterator[StateDifference]:
    groups: dict[tuple[str, float, float, bool], list[str]] = {}
    by_scheduler = any(
        differ_in(one, other, "scheduler") for one, other in zip(saved.objects, resumed.objects, strict=False)
    )
    for (path, slot), own in saved.settings.items():
        other = resumed.settings.get((path, slot))
        if other is None or other == own or (other != other and own != own):
            continue
        kept = fresh.settings.get((path, slot)) == other
        groups.setdefault((slot, own, other, kept), []).append(path)
    for (slot, own, other, kept), paths in groups.items():
        values = f"{other:g}; it was {own:g}" if f"{other:g}" != f"{own:g}" else f"{other:.9g}; it was {own:.9g}"
        why = ""
        if kept:
            why = ": the scheduler was not restored" if slot == "lr" and by_scheduler else ": it was not restored"
        several = more_text(len(paths) - 1, "group", before=", and the same holds for")
        message = f"The {_WORDS.get(slot, slot)} of {paths[0]} before step {at} is {values}{why}{several}."
        evidence = {"slot": slot, "saved": own, "resumed": other}
        yield StateDifference(what="setting", sites=tuple(paths), message=message, evidence=evidence)
