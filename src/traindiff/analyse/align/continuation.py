"""A run that continues another one from a checkpoint: the step of the other run at which it begins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.align.beginnings import Beginning, beginnings, same_bits, values_at
from traindiff.analyse.align.side import SideStep
from traindiff.analyse.merge.parameters import parameter_groups, trained_parameters
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import MergedSite, StepTable, origin
from traindiff.core.observation import BEFORE, EDITED
from traindiff.core.summary import distance, finite_count, norm_of, rounding
from traindiff.storage import Recording

NEAR = 0.5
"""A parameter is near another run's at a step if the two are apart by at most this part of what the step changes.

Rounding of the steps before may have parted them: on other hardware, or on another number of ranks.
"""

_LONG = rounding("float32")

_LOST = 10.0
"""A parameter was not loaded if it is apart by this many times what the step changes, where most others are near."""

_NOISE = 1e-4
"""A gradient is only rounding if the root of its mean square is less than this part of that of all gradients, or, in
short dtypes, than ten units of rounding: the bias of keys, or one before a norm. Adaptive steps drive such a parameter
anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Where one of two runs begins in the other one.

    Attributes:
        own: A step of the candidate, as it counts.
        step: The step of the baseline that begins with the same parameters.
        same: Number of parameters that are the same there or near (`NEAR`), of those that tell one step from another.
        of: Number of parameters that tell one step from another, and are known there.
        exact: Whether these are the same to the bit.
        others: What is added to the numbers of the candidate's steps of other optimizers, by name, if that is known.
        apart: Paths of the parameters that are other ones there, although most are the same to the bit; in long dtypes.
    """

    own: int
    step: int
    same: int
    of: int
    exact: bool
    others: Mapping[str, int] = field(default_factory=dict)
    apart: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """The sentence that tells a reader which steps were compared."""
        how = "the parameters" if self.same == self.of else f"{self.same} of {self.of} parameters"
        near = "" if self.exact else " but for rounding"
        return (
            f"Step {self.own} of the candidate begins with {how} of the baseline's step {self.step}{near}, and is "
            f"compared as step {self.step}; so are the steps after it. --offset 0 compares steps by their own numbers."
        )


def find_continuation(baseline: Recording, candidate: Recording, rename: Rename) -> Continuation | None:
    """The step of the baseline at which a candidate begins that counts its steps from 0.

    If it begins nowhere in the baseline, the step of the candidate at which such a baseline begins: one that was
    recorded from the middle of its training on. If one of them begins between two recorded steps of the other one, the
    step at which it comes to the later one of these.

    Args:
        baseline: The run that is trusted.
        candidate: The other run.
        rename: Turns the candidate's paths into the baseline's.

    Returns:
        The place; None if both runs begin with the same step, neither begins in the other one, both say with
        `first_step` where they begin, or one says so and the other one has not recorded that step.
    """
    runs = _Run(baseline, str), _Run(candidate, rename)
    numbered = any(one.begun and other.leaves_out(one.begun) for one, other in (runs, runs[::-1]))
    if numbered or all(one.begun for one in runs):
        return None
    found = _place_of(runs[1], runs[0])
    back = _turned(_place_of(runs[0], runs[1])) if found is None or runs[0].begun else None
    if any(one is not None and one.own == one.step for one in (found, back)):
        return None
    return found or back


def _turned(found: Continuation | None) -> Continuation | None:
    """The place where the baseline begins in the candidate, from the place of the candidate in the baseline."""
    others = {name: -number for name, number in found.others.items()} if found else {}
    return found and replace(found, own=found.step, step=found.own, others=others)


class _Run:
    """A recording, and what its steps begin with.

    Args:
        recording: The run.
        rename: Turns its paths into the baseline's.

    Attributes:
        begun: Number of the step in which it was attached.
        first: What that step begins with; None if it was not recorded.
        trained: As `trained_parameters`.
        is_whole: Whether it has recorded every step.
    """

    def __init__(self, recording: Recording, rename: Rename) -> None:
        self._recording, self._rename = recording, rename
        self.begun = recording.run.get("first_step") or 0
        first = next(self.steps(), None)
        self.first = first if first is not None and first.step == self.begun else None
        self.trained = trained_parameters(recording, parameter_groups(recording, rename), rename)
        self.is_whole = recording.run["settings"].get("every", 1) == 1 and not recording.run["settings"].get("steps")

    def leaves_out(self, step: int) -> bool:
        """True if it recorded steps before and after a step, but not this one."""
        recorded = [number for _, number, _ in self._recording.order()]
        return bool(recorded) and min(recorded) < step < max(recorded) and step not in recorded

    def steps(self) -> Iterator[Beginning]:
        """What its steps begin with."""
        return beginnings(self._recording, self._rename)


def _place_of(run: _Run, other: _Run) -> Continuation | None:
    """Where a run begins in another one; `own` is a step of the run.

    Args:
        run: The run that may continue the other one.
        other: The other run.
    """
    if run.first is None:
        return None
    found, between = _place_in(other.steps(), run.first, run.trained)
    if found is not None:
        return found if other.is_whole else _with_main_alone(found)
    if between is None:
        return None
    later = next((one for one in other.steps() if (one.optimizer, one.step) == (run.first.optimizer, between)), None)
    found, _ = _place_in(run.steps(), later, run.trained)
    return found and _turned(_with_main_alone(found))


def _with_main_alone(found: Continuation) -> Continuation:
    """A place with the first optimizer's number alone: others may have stepped between recorded steps.

    So what they hold may have changed, too.
    """
    return replace(found, others=dict(list(found.others.items())[:1]), apart=())


def _place_in(
    steps: Iterable[Beginning], first: Beginning | None, trained: Collection[str]
) -> tuple[Continuation | None, int | None]:
    """The step of a run that begins with the same parameters as a given step of another run.

    The parameters with which the given step begins are looked for before the step of the same number, and if they are
    not there, before every other one. They are there if they are the same, or much nearer (`NEAR`) than one step away
    from it. Only parameters that are trained count, with several different elements: constant ones (of norms, biases)
    are the same in many trainings. More than half of them must be there, and more than at the step of the same number.
    Where all are constant (`_telling`), they must be the same.

    Args:
        steps: The steps of the run.
        first: What that step of the other run begins with; None if it was not recorded.
        trained: Paths of the parameters that are trained.

    Returns:
        The step, which may be that of the same number, and if there is none, the number of the later one of the two
        steps between which the other run may begin: the nearest one, or the one after it.
    """
    if first is None:
        return None, None
    wanted = _telling(first.parameters, trained)
    own = 0
    found: list[tuple[int, _Apart]] = []
    gaps: list[tuple[float, int]] = []
    aparts = (_Apart.of_step(first, wanted, one) for one in steps if one.optimizer == first.optimizer)
    for before, one, after in _between(aparts):
        # Beside it may be a step some steps away, if not all are recorded.
        beside = [other.sizes / abs(other.step - one.step) for other in (before, after) if other is not None]
        same = one.num_near([NEAR * sizes for sizes in beside])
        if before is not None and one.step > before.step + 1:
            gaps.append((float(np.median(np.nan_to_num(before.sizes + one.sizes, nan=math.inf))), one.step))
        if one.step == first.step:
            own = same
            if same == one.known:
                return Continuation(own=one.step, step=one.step, same=same, of=one.of, exact=False), None
        elif same and 2 * same > one.known:
            found.append((same, one))
    most = max((same for same, _ in found), default=0)
    if most <= own:
        return None, None if 2 * own > len(wanted) else min(gaps, default=(0.0, None))[1]
    best = [one for same, one in found if same == most]
    one = next((one for one in best if one.same_batch), best[0])
    exact = most == one.num_near([])
    others = {
        name: number - first.next_steps[name] for name, number in one.next_steps.items() if name in first.next_steps
    }
    apart = tuple(
        path for (path, entry), size in zip(wanted.items(), one.sizes, strict=True)
        if exact and size > 0.0 and rounding(entry.dtype) <= _LONG
    )  # fmt: skip
    return (
        Continuation(own=first.step, step=one.step, same=most, of=one.of, exact=exact, others=others, apart=apart),
        None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart:
    """How far the parameters with which a step of a run begins are from those with which another run begins.

    Attributes:
        step: Its number.
        sizes: L2 distance of each parameter; 0 for the same bits, NaN if it is not known, or has another shape.
        constant: Which parameters hold one number only, which may come near another one by chance.
        known: Number of parameters that both have.
        of: The same, with those that are not known yet.
        same_batch: Whether it begins with the same batch.
        next_steps: As in `Beginning`.
    """

    step: int
    sizes: NDArray[np.float64]
    constant: NDArray[np.bool_]
    known: int
    of: int
    same_batch: bool
    next_steps: Mapping[str, int]

    @classmethod
    def of_step(cls, first: Beginning, wanted: Mapping[str, MergedSite], one: Beginning) -> _Apart:
        """Of a step that begins so.

        Args:
            first: What the other run begins with.
            wanted: Its parameters that tell one step from another.
            one: What the step begins with.
        """
        there = [one.parameters.get(path) for path in wanted]
        sizes = [
            math.nan if other is None else _apart(entry, other)
            for entry, other in zip(wanted.values(), there, strict=True)
        ]
        constant = np.array([not _varies(entry) for entry in wanted.values()], dtype=np.bool_)
        return cls(
            step=one.step, sizes=np.array(sizes), constant=constant, known=sum(other is not None for other in there),
            of=len(wanted), same_batch=_same_batch(first, one), next_steps=one.next_steps,
        )  # fmt: skip

    def num_near(self, limits: Sequence[NDArray[np.float64]]) -> int:
        """Number of parameters that are the same, or not further apart than any of these limits, if there are any."""
        near = (self.sizes <= np.fmin.reduce(limits)) & ~self.constant if limits else False
        return int(((self.sizes == 0.0) | near).sum())


def _apart(one: MergedSite, other: MergedSite) -> float:
    """Distance of two parameters; 0 for the same bits, NaN if they have other shapes, or their places are not known."""
    if same_bits(one, other):
        return 0.0
    if one.shape != other.shape or not (one.placed and other.placed):
        return math.nan
    return float(distance(one.summary, other.summary))


_Item = TypeVar("_Item")


def _between(items: Iterable[_Item]) -> Iterator[tuple[_Item | None, _Item, _Item | None]]:
    """Each item with the one before and the one after it."""
    before: _Item | None = None
    now: _Item | None = None
    for item in items:
        if now is not None:
            yield before, now, item
        before, now = now, item
    if now is not None:
        yield before, now, None


def other_offsets(
    baseline: Recording, candidate: Recording, offset: int, known: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """What is added to the step numbers of optimizers that step more or less often than the first one, by name.

    A run that continues another one counts the steps of all its optimizers from the same number. In the run that it
    continues, each has a number of its own by then. So the steps that the candidate has recorded of an optimizer are
    looked for in the baseline by their places among the steps of the first optimizer.

    Args:
        baseline: The run that is continued.
        candidate: The run that begins in its middle.
        offset: What is added to the numbers of the steps of the optimizer that steps first. If it is negative, the
            baseline begins in the middle of the candidate.
        known: What is added to those of some others, by name, where that is known.
    """
    if offset < 0:
        negated = {name: -number for name, number in known.items()}
        return {name: -number for name, number in other_offsets(candidate, baseline, -offset, negated).items()}
    names = [one["name"] for rank in candidate.ranks[:1] for one in candidate.rank_content(rank).get("optimizers", ())]
    if len(names) < 2 or not baseline.ranks:
        return dict(known)
    begun = candidate.run.get("first_step") or 0
    main, first, _ = next(candidate.order(), ("", 0, {}))
    if not main or first != begun or begun + offset <= 0:
        return dict(known)  # it has not recorded its first step: the numbers may be those of a run from its beginning
    # Steps of others are recorded only while one of the optimizer that is listed first is.
    clock = names[0] if names[0] in known else main
    shift = known.get(clock, offset)
    own, theirs = _places(candidate, clock), _places(baseline, clock)
    found = {name: _offset_of(places, theirs.get(name, ()), shift) for name, places in own.items() if name != main}
    return {name: number for name, number in {**found, **known}.items() if number != offset}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A step of an optimizer, and between which steps of the first optimizer it came.

    Attributes:
        step: Its number.
        after: The latest step of the first optimizer that is known to have come before it; -1 for none.
        before: The first one that is known to have come after it; infinity for none. If all steps are recorded, this is
            the next one.
    """

    step: int
    after: int
    before: float

    def may_be(self, other: _Place, offset: int) -> bool:
        """True if another run's step may have come at the same place.

        Args:
            other: The other run's step.
            offset: What is added to the numbers of the first optimizer's steps in the other run.
        """
        return self.after < other.before + offset and other.after + offset < self.before


def _places(recording: Recording, main: str) -> dict[str, list[_Place]]:
    """The steps of each optimizer but the first one, by name.

    Args:
        recording: The run.
        main: The first optimizer.
    """
    rows = list(recording.order())
    found: dict[str, list[_Place]] = {}
    for name in dict.fromkeys(optimizer for optimizer, _, _ in rows if optimizer != main):
        later = deque((after.get(name, -1), step) for optimizer, step, after in rows if optimizer == main)
        for step, after in ((step, after) for optimizer, step, after in rows if optimizer == name):
            while later and later[0][0] < step:
                later.popleft()
            place = _Place(step=step, after=after.get(main, -1), before=later[0][1] if later else math.inf)
            found.setdefault(name, []).append(place)
    return found


def _offset_of(own: Sequence[_Place], theirs: Sequence[_Place], offset: int) -> int:
    """What is added to the step numbers of an optimizer.

    One step tells it, if the runs recorded every step. Otherwise, the latest step before one of the first optimizer
    that both recorded does, and if there is none, the places of several steps. If the optimizer seems to be one step
    ahead of the first one, it is not: then the two step in another order in each run. So they do if it seems to be one
    step behind, and has stepped as often as the first one in both runs.

    Args:
        own: The candidate's steps of it.
        theirs: The baseline's.
        offset: What is added to the numbers of the first optimizer's steps.
    """
    found: list[int] = []
    if any(1 < one.before - one.after < math.inf for one in (*own, *theirs)):
        ends, their_ends = ({one.before: one.step for one in places} for places in (own, theirs))
        both = (end for end in ends if end < math.inf and end + offset in their_ends)
        found = [int(their_ends[end + offset] - ends[end]) for end in both][:1]
    for place in own:
        if len(found) == 1:
            break
        possible = [one.step - place.step for one in theirs if one.may_be(place, offset)]
        found = [number for number in found if number in possible] or found if found else possible
    if not found:
        found = [one.step - own[0].step for one in theirs if one.after >= own[0].after + offset] or [offset]
    in_turns = all(one.step - one.after in (0, 1) for one in (*own, *theirs) if one.after >= 0)
    in_another_order = found[0] == offset + 1 or (found[0] == offset - 1 and in_turns)
    return offset if in_another_order else found[0]


def begin_alike(baseline: RunStep | None, candidate: RunStep | None, rename: Rename, trained: Collection[str]) -> bool:
    """True if two steps, the first of their runs, show that there is nothing for `find_continuation` to find.

    Args:
        baseline: The step of the run that is trusted; None if it does not have it.
        candidate: The step of the other run; None if it does not have it.
        rename: Turns the candidate's paths into the baseline's.
        trained: Paths of the parameters that the candidate trains.
    """
    if baseline is None or candidate is None or baseline.step or baseline.earlier or candidate.earlier:
        return False
    theirs, found = (
        {path: entry for path, entry in _found_by(one.table).items() if not entry.unobserved}
        for one in (baseline, candidate)
    )
    same, of = _num_same(_telling({rename(path): entry for path, entry in found.items()}, trained), theirs)
    return bool(found) and same == of


def _found_by(table: StepTable) -> dict[str, MergedSite]:
    """The parameters that a step has recorded as it found them, by path."""
    return {**values_at(table, BEFORE), **values_at(table, EDITED)}


def _num_same(wanted: Mapping[str, MergedSite], parameters: Mapping[str, MergedSite]) -> tuple[int, int]:
    """Number of parameters that have the same bits, and of those that are in both."""
    of = [path for path in wanted if path in parameters]
    return sum(same_bits(wanted[path], parameters[path]) for path in of), len(of)


def _telling(parameters: Mapping[str, MergedSite], trained: Collection[str]) -> dict[str, MergedSite]:
    """The parameters that tell one step from another: of those that are trained, the ones with several values.

    All of these, if none has: a Gaussian process, or a fit of some constants, has parameters of one element only.
    """
    known = {path: entry for path, entry in parameters.items() if not entry.unobserved}
    moving = {path: entry for path, entry in known.items() if path in trained} or known
    return {path: entry for path, entry in moving.items() if _varies(entry)} or moving


def _varies(entry: MergedSite) -> bool:
    return float(entry.summary["minimum"]) < float(entry.summary["maximum"])


def _same_batch(one: Beginning, other: Beginning) -> bool:
    return bool(one.batch) and all(
        site in other.batch and same_bits(entry, other.batch[site]) for site, entry in one.batch.items()
    )


def with_beginning(
    side: SideStep,
    before: Mapping[str, MergedSite],
    other: SideStep,
    trained: Collection[str],
    *,
    begins: bool,
) -> SideStep:
    """A step in the middle of a training, with the parameters that it finds.

    The other run begins with this step, or has not recorded the steps before, and shows what it finds. What that is in
    this run follows from its steps before; a run that has not recorded all of them shows it too. They are held against
    each other only if the other run continues this one: more than half of those that tell one step from another have
    the same bits. If more than half are `NEAR`, rounding has parted them in steps before: then only those are held
    against each other that are so far apart that they were not loaded, or that are still as this run began.

    Args:
        side: The step of the run.
        before: The parameters as it finds them, by path; of several optimizers, as the first step of all does.
        other: The step of the other run.
        trained: Paths of the parameters that the other run trains.
        begins: Whether the other run begins with this step, and this run does not.
    """
    found = {
        key.path: replace(before[key.path], key=key, order=entry.order)
        for key, entry in other.table.items()
        if key[:2] == ("param", BEFORE) and key.slot == "value" and (begins or key not in side.table)
        and key.path in before
    }  # fmt: skip
    apart = {path: _apart(entry, other.table[entry.key]) for path, entry in found.items()}
    moved = {one.key.path: norm_of(one.summary) for one in side.updates if not one.unobserved}
    near = {path for path, size in apart.items() if size <= NEAR * moved.get(path, 0.0)}
    telling = _telling(found, trained)
    if 2 * sum(apart[path] == 0.0 for path in telling) > len(telling):
        # In a short dtype, rounding parts a few of many parameters.
        rounded = {path for path in telling if apart[path] and rounding(found[path].dtype) > _LONG} & near
        held = found.keys() - rounded
    elif 2 * len(near.intersection(telling)) > len(telling):
        varying = _telling(found, found)
        held = _lost(side, varying, apart, moved)
        held |= {path for path in varying if apart[path] and _is_as_begun(side, other.table[found[path].key])}
    else:
        return side
    table = {key: entry for key, entry in side.table.items() if key.path not in found or key != found[key.path].key}
    return replace(side, table={**{entry.key: entry for path, entry in found.items() if path in held}, **table})


def _is_as_begun(side: SideStep, entry: MergedSite) -> bool:
    """True if a parameter has the bits with which a run began: the other one, of the same seed, did not load it."""
    return any(bits == side.began.get(entry.key.path) for bits in origin([entry]))


def _lost(
    side: SideStep, found: Mapping[str, MergedSite], apart: Mapping[str, float], moved: Mapping[str, float]
) -> set[str]:
    """Paths of the parameters that are too far apart for rounding to have parted them in steps before.

    Args:
        side: The step.
        found: The parameters that tell one step from another, as it finds them, by path.
        apart: How far each is from that of the other run.
        moved: What the step changes of each.
    """
    gradients = {
        key.path: entry for key, entry in side.table.items()
        if key.phase == "grad" and not key.stage and key.slot == "grad" and not entry.unobserved
    }  # fmt: skip
    squares = sum(float(one.summary["sum_of_squares"]) for one in gradients.values())
    size = math.sqrt(squares / max(1, sum(int(finite_count(one.summary)) for one in gradients.values())))
    norms = {path: norm_of(one.summary) for path, one in found.items()}
    step = float(np.median([moved[path] / norms[path] for path in found if path in moved and norms[path]] or [0.0]))
    lost = {path for path in found if apart[path] > _LOST * max(moved.get(path, 0.0), step * norms[path])}
    computed_in = max((rounding(entry.dtype) for key, entry in side.table.items() if key.phase != "batch"), default=0.0)
    limit = max(_NOISE, 10.0 * computed_in) * size
    return {path for path in lost if not 0.0 < _mean_size(gradients.get(path)) < limit}


def _mean_size(entry: MergedSite | None) -> float:
    """Root of the mean square of a tensor; 0 if there is none."""
    return 0.0 if entry is None else norm_of(entry.summary) / math.sqrt(max(1, int(finite_count(entry.summary))))
