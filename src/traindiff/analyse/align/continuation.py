"""A run that continues another one from a checkpoint: the step of the other run at which it begins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.align.side import SideStep
from traindiff.analyse.merge.merged_tables import MergedTables
from traindiff.analyse.merge.parameters import parameter_groups
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import MergedSite, Part, SiteKey, StepTable, origin
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.observation import BEFORE, EDITED, Observation
from traindiff.core.summary import distance, finite_count, norm_of, number, rounding
from traindiff.storage import Recording

Site = tuple[str, str]

Found = tuple[str, MergedSite, int]
"""The path of a parameter, how a step of its optimizer finds it, and the number of that step."""

_MOST_WAITING = 16
"""Steps that are held until the first optimizer has stepped, which may rest for long: a bound of memory."""

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
class Beginning:
    """What a step begins with.

    Attributes:
        optimizer: Name of the optimizer that counts the step.
        step: Its number.
        parameters: The parameters as the step finds them, by path.
        late: Paths of other ones: a step of their optimizer, which came before, is not known yet.
        batch: The inputs of the model, by path and slot.
        random: The states of random generators before the first forward pass, by slot.
        settings: The settings of the optimizers, by path and slot.
        next_steps: The number of the next step of each optimizer, by name.
    """

    optimizer: str
    step: int
    parameters: Mapping[str, MergedSite]
    late: frozenset[str]
    batch: Mapping[Site, MergedSite]
    random: Mapping[str, MergedSite]
    settings: Mapping[Site, float]
    next_steps: Mapping[str, int]

    def with_found(self, found: Iterable[Found], holders: Mapping[str, str]) -> Beginning:
        """The same with parameters that only a step of another optimizer has recorded.

        Args:
            found: The parameters.
            holders: Name of the optimizer of each parameter, by path.
        """
        further = {
            path: entry for path, entry, step in found
            if not entry.unobserved and self.next_steps.get(holders.get(path, ""), step) == step
        }  # fmt: skip
        return replace(self, parameters={**self.parameters, **further}, late=self.late.difference(further))


def beginnings(recording: Recording, rename: Rename = str) -> Iterator[Beginning]:
    """What each step of a recording begins with; memory holds the steps until the first optimizer has stepped.

    The parameters that a round of several optimizers finds are recorded with the first of them, which may be the last
    to step: in a GAN, the discriminator may step before, and several times.

    Args:
        recording: The run.
        rename: Turns its paths into the baseline's.
    """
    held: dict[str, MergedSite] = {}
    latest: dict[str, int] = {}  # step, by optimizer
    waiting: list[Beginning] = []
    begun = recording.run.get("first_step") or 0
    groups = parameter_groups(recording, rename)
    main = next(iter(groups), "")
    holders = {path: name for name, of_one in groups.items() for group in of_one for path in group}
    merged = MergedTables(recording.world_size, 0, recording.path)
    for of_ranks in rank_steps(recording):
        optimizer, step, after = of_ranks[0].optimizer, of_ranks[0].step, of_ranks[0].after
        if of_ranks[0].places is not None:
            table = merged.table(of_ranks[0])
        else:
            parts: list[Part] = [
                (seen, one.rank, summary)
                for one in of_ranks
                for seen, summary in zip(one.observations, one.summaries, strict=True)
                if _is_wanted(seen)
            ]
            table = step_table(parts)
        of_ranks.clear()
        next_steps = {name: max(begun, after.get(name, -1) + 1) for name in groups} | {optimizer: step}
        before, edited, stepped = (
            {rename(path): entry.without_parts() for path, entry in _values_at(table, stage).items()}
            for stage in (BEFORE, EDITED, "")
        )
        found = [(path, entry, step) for path, entry in before.items()]
        found += [(path, entry, next_steps.get(holders.get(path, ""), step)) for path, entry in edited.items()]
        later = [(path, entry, step + 1) for path, entry in stepped.items()]
        waiting = [one.with_found([*found, *later], holders) for one in waiting]
        num_done = len(waiting) if optimizer == main else max(0, len(waiting) - _MOST_WAITING)
        yield from waiting[:num_done]
        held.update((path, one) for path, one, number in found if latest.get(holders.get(path, ""), -1) < number)
        # A step is complete when its optimizer begins the next one, which others may do more often.
        not_yet = [name for name, number in after.items() if latest.get(name, -1) < number]
        late = frozenset(path for name in not_yet for group in groups.get(name, ()) for path in group)
        beginning = Beginning(
            optimizer=optimizer,
            step=step,
            parameters={path: one for path, one in held.items() if not (one.unobserved or path in late)},
            late=late,
            next_steps=next_steps,
            batch={
                (rename(key.path), key.slot): entry
                for key, entry in table.items()
                if key[:2] == ("batch", "") and key.path != "rng" and not entry.unobserved
            },
            random={
                key.slot: entry
                for key, entry in reversed(table.items())
                if key.path == "rng" and key.stage == BEFORE and not entry.unobserved
            },
            settings={
                (key.path, key.slot): number(entry.summary)
                for key, entry in table.items()
                if key.group and not entry.unobserved
            },
        )
        waiting = [*waiting[num_done:], beginning]
        held.update(stepped)
        latest[optimizer] = step
    yield from waiting


def _is_wanted(seen: Observation) -> bool:
    if seen.phase == "batch":
        return seen.stage in ("", BEFORE)
    return seen.phase == "param" or (seen.phase == "optimizer" and ".groups[" in seen.path)


def _is_value(key: SiteKey) -> bool:
    return key.phase == "param" and key.slot == "value"


def same_bits(one: MergedSite, other: MergedSite) -> bool:
    """True if two sites hold the same elements in the same places."""
    return (
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and one.exact
        and other.exact
        and all(one.summary[name] == other.summary[name] for name in ("fingerprint", "multiset"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Where one of two runs begins in the other one.

    Attributes:
        own: A step of the candidate, as it counts.
        step: The step of the baseline that begins with the same parameters.
        same: Number of parameters that are the same there or near (`NEAR`), of those that tell one step from another.
        of: Number of parameters that tell one step from another, and are known there.
        exact: Whether these are the same to the bit.
    """

    own: int
    step: int
    same: int
    of: int
    exact: bool

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
    return found and replace(found, own=found.step, step=found.own)


class _Run:
    """A recording, and what its steps begin with.

    Args:
        recording: The run.
        rename: Turns its paths into the baseline's.

    Attributes:
        begun: Number of the step in which it was attached.
        first: What that step begins with; None if it was not recorded.
    """

    def __init__(self, recording: Recording, rename: Rename) -> None:
        self._recording, self._rename = recording, rename
        self.begun = recording.run.get("first_step") or 0
        first = next(self.steps(), None)
        self.first = first if first is not None and first.step == self.begun else None

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
    found, between = _place_in(other.steps(), run.first)
    if found is not None or between is None:
        return found
    later = next((one for one in other.steps() if (one.optimizer, one.step) == (run.first.optimizer, between)), None)
    return _turned(_place_in(run.steps(), later)[0])


def _place_in(steps: Iterable[Beginning], first: Beginning | None) -> tuple[Continuation | None, int | None]:
    """The step of a run that begins with the same parameters as a given step of another run.

    The parameters with which the given step begins are looked for before the step of the same number, and if they are
    not there, before every other one. They are there if they are the same, or much nearer (`NEAR`) than one step away
    from it. Only parameters with several different elements count, because constant ones (of norms, biases) are the
    same in many trainings; and more than half of them must be there, and more than at the step of the same number.
    Where all are constant (`_telling`), they must be the same.

    Args:
        steps: The steps of the run.
        first: What that step of the other run begins with; None if it was not recorded.

    Returns:
        The step, which may be that of the same number, and if there is none, the number of the later one of the two
        steps between which the other run may begin: the nearest one, or the one after it.
    """
    if first is None:
        return None, None
    wanted = _telling(first.parameters)
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
    return Continuation(own=first.step, step=one.step, same=most, of=one.of, exact=exact), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart:
    """How far the parameters with which a step of a run begins are from those with which another run begins.

    Attributes:
        step: Its number.
        sizes: L2 distance of each parameter; 0 for the same bits, NaN if it is not known, has another shape, or is
            constant and another number: one number may come near another by chance.
        known: Number of parameters that both have.
        of: The same, with those that are not known yet.
        same_batch: Whether it begins with the same batch.
    """

    step: int
    sizes: NDArray[np.float64]
    known: int
    of: int
    same_batch: bool

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
            math.nan if other is None or not (_varies(entry) or same_bits(entry, other)) else _apart(entry, other)
            for entry, other in zip(wanted.values(), there, strict=True)
        ]
        return cls(
            step=one.step, sizes=np.array(sizes), known=sum(other is not None for other in there),
            of=len(wanted.keys() - one.late), same_batch=_same_batch(first, one),
        )  # fmt: skip

    def num_near(self, limits: Sequence[NDArray[np.float64]]) -> int:
        """Number of parameters that are the same, or not further apart than any of these limits, if there are any."""
        near = self.sizes <= np.fmin.reduce(limits) if limits else False
        return int(((self.sizes == 0.0) | near).sum())


def _apart(one: MergedSite, other: MergedSite) -> float:
    """Distance of two parameters; 0 for the same bits, NaN if they have other shapes, or their places are not known."""
    if same_bits(one, other):
        return 0.0
    if one.shape != other.shape or not (one.placed and other.placed):
        return math.nan
    return float(distance(one.summary, other.summary))


_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


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


def other_offsets(baseline: Recording, candidate: Recording, offset: int) -> dict[str, int]:
    """What is added to the step numbers of optimizers that step more or less often than the first one, by name.

    A run that continues another one counts the steps of all its optimizers from the same number. In the run that it
    continues, each has a number of its own by then. So the steps that the candidate has recorded of an optimizer are
    looked for in the baseline by their places among the steps of the first optimizer.

    Args:
        baseline: The run that is continued.
        candidate: The run that begins in its middle.
        offset: What is added to the numbers of the first optimizer's steps. If it is negative, the baseline begins in
            the middle of the candidate.
    """
    if offset < 0:
        return {name: -number for name, number in other_offsets(candidate, baseline, -offset).items()}
    names = {one["name"] for rank in candidate.ranks[:1] for one in candidate.rank_content(rank).get("optimizers", ())}
    if len(names) < 2 or not baseline.ranks:
        return {}
    begun = candidate.run.get("first_step") or 0
    main, first, _ = next(candidate.order(), ("", 0, {}))
    if not main or first != begun or begun + offset <= 0:
        return {}  # it has not recorded its first step, so the numbers may be those of a run from its beginning
    own, theirs = _places(candidate, main), _places(baseline, main)
    found = {name: _offset_of(places, theirs.get(name, ()), offset) for name, places in own.items()}
    return {name: number for name, number in found.items() if number != offset}


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

    One step tells it, if the runs recorded every step; otherwise, further ones do. If the optimizer seems to be one
    step ahead of the first one, it is not: then the two step in another order in each run.

    Args:
        own: The candidate's steps of it.
        theirs: The baseline's.
        offset: What is added to the numbers of the first optimizer's steps.
    """
    found: list[int] = []
    for place in own:
        if len(found) == 1:
            break
        possible = [one.step - place.step for one in theirs if one.may_be(place, offset)]
        found = [number for number in found if number in possible] or found if found else possible
    if not found:
        found = [one.step - own[0].step for one in theirs if one.after >= own[0].after + offset] or [offset]
    return offset if found[0] == offset + 1 else found[0]


def begin_alike(baseline: RunStep | None, candidate: RunStep | None, rename: Rename) -> bool:
    """True if two steps, the first of their runs, show that there is nothing for `find_continuation` to find.

    Args:
        baseline: The step of the run that is trusted; None if it does not have it.
        candidate: The step of the other run; None if it does not have it.
        rename: Turns the candidate's paths into the baseline's.
    """
    if baseline is None or candidate is None or baseline.step or baseline.earlier or candidate.earlier:
        return False
    theirs, found = (
        {path: entry for path, entry in _found_by(one.table).items() if not entry.unobserved}
        for one in (baseline, candidate)
    )
    same, of = _num_same({rename(path): entry for path, entry in _telling(found).items()}, theirs)
    return bool(found) and same == of


def _found_by(table: StepTable) -> dict[str, MergedSite]:
    """The parameters that a step has recorded as it found them, by path."""
    return {**_values_at(table, BEFORE), **_values_at(table, EDITED)}


def _values_at(table: StepTable, stage: str) -> dict[str, MergedSite]:
    """The parameters that a step has recorded at a stage, by path."""
    return {key.path: entry for key, entry in table.items() if _is_value(key) and key.stage == stage}


def _num_same(wanted: Mapping[str, MergedSite], parameters: Mapping[str, MergedSite]) -> tuple[int, int]:
    """Number of parameters that have the same bits, and of those that are in both."""
    of = [path for path in wanted if path in parameters]
    return sum(same_bits(wanted[path], parameters[path]) for path in of), len(of)


def _telling(parameters: Mapping[_Key, MergedSite]) -> dict[_Key, MergedSite]:
    """The parameters that tell one step from another: those that hold several different numbers.

    All, if none does: a Gaussian process, or a fit of some constants, has parameters of one element only.
    """
    known = {key: entry for key, entry in parameters.items() if not entry.unobserved}
    return {key: entry for key, entry in known.items() if _varies(entry)} or known


def _varies(entry: MergedSite) -> bool:
    return float(entry.summary["minimum"]) < float(entry.summary["maximum"])


def _same_batch(one: Beginning, other: Beginning) -> bool:
    return bool(one.batch) and all(
        site in other.batch and same_bits(entry, other.batch[site]) for site, entry in one.batch.items()
    )


def with_beginning(side: SideStep, other: SideStep, *, begins: bool) -> SideStep:
    """A step in the middle of a training, with the parameters that it finds.

    The other run begins with this step, or has not recorded the steps before, and shows what it finds. What that is in
    this run follows from its steps before; a run that has not recorded all of them shows it too. They are held against
    each other only if the other run continues this one: more than half of those that tell one step from another have
    the same bits. If more than half are `NEAR`, rounding has parted them in steps before: then only those are held
    against each other that are so far apart that they were not loaded, or that are still as this run began.

    Args:
        side: The step of the run.
        other: The step of the other run.
        begins: Whether the other run begins with this step, and this run does not.
    """
    found = {
        key: replace(side.before[key.path], key=key, order=entry.order)
        for key, entry in other.table.items()
        if key[:2] == ("param", BEFORE) and key.slot == "value" and (begins or key not in side.table)
        and key.path in side.before
    }  # fmt: skip
    table = {key: entry for key, entry in side.table.items() if key not in found}
    telling = _telling(found)
    apart = {key.path: _apart(found[key], other.table[key]) for key in telling}
    moved = {one.key.path: norm_of(one.summary) for one in side.updates if not one.unobserved}
    near = {path for path, size in apart.items() if size <= NEAR * moved.get(path, 0.0)}
    if 2 * sum(size == 0.0 for size in apart.values()) > len(telling):
        # In a short dtype, rounding parts a few of many parameters.
        rounded = {key.path for key in telling if apart[key.path] and rounding(found[key].dtype) > _LONG} & near
        held = {key.path for key in found} - rounded
    elif 2 * len(near) > len(telling):
        held = _lost(side, {key.path: entry for key, entry in telling.items()}, apart, moved)
        held |= {key.path for key in telling if apart[key.path] and _is_as_begun(side, other.table[key])}
    else:
        return side
    return replace(side, table={**{key: entry for key, entry in found.items() if key.path in held}, **table})


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
