"""Choices of rows, such as a router's of experts: how many were made otherwise, as far as the recordings show it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from traindiff.analyse.merge.distance import Pair, equal_bits
from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.noise.uncalibrated import SEEN_FLIPS
from traindiff.core.summary import UNIT_ROUNDOFF, distance, largest

MOST_CHOICES = 64
"""Whole numbers in a last axis of at most so many are the choices of one row."""


MOST_OF_A_ROW = 8
"""Experts that one row chooses, at most."""


_ONE_ROW, _FEW_ROWS = 0.5, 4.0
"""Squares, in those of a mean row: what an exchanged row adds to a difference at least, and to a sum at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """One group of rows that choose.

    Attributes:
        order: Place in execution order from which on the choice has an effect.
        where: Where the recordings show it.
        rows: Number of choices.
        turned: About how many of those were made otherwise, at least: two that change places do not show in counts. 0
            if the choices of two runs cannot be compared one by one.
        chosen: By path of a module that computes with the rows that chose it: their number.
        gathered: Whether these modules get only such rows, so that the rows of two runs do not correspond.
        computed: Whether the module that chooses also computes with what was chosen, as the codebook of a VQ-VAE does.
            Then what it compares is not observed, and its rounding turns choices though its inputs agree.
        by_scores: Whether the output at `where` is what shows it, so that its difference is that of the choice.
    """

    order: int
    where: str
    rows: int
    turned: int
    chosen: Mapping[str, int] = field(default_factory=dict)
    gathered: bool = False
    computed: bool = False
    by_scores: bool = False

    def share(self, hidden: float, path: str, rows: int, peak: float = 1.0) -> float:
        """Relative size, squared, that a difference may have because of choices made otherwise.

        A row that chose another expert is another row, of the same size: two such differ by sqrt(2) of it. Rows have
        different sizes, so a few of them may hold more than their share.

        Args:
            hidden: Number of further choices that may have turned unseen.
            path: The module.
            rows: Of the tensor. Each may have made a few of the choices.
            peak: Square of the largest element over the mean square, for gradients, of which a few rows may hold most.
        """
        turned = self.turned + hidden
        several = rows and self.rows % rows == 0 and self.rows // rows <= MOST_OF_A_ROW
        chosen = self.chosen.get(path, rows if several else self.rows)
        return min(2.0, 2.0 * (turned + math.sqrt(turned) * peak) / max(1, chosen))


class TurnedChoices:
    """The choices of a step that were made otherwise in the candidate, because of rounding.

    Args:
        pairs: All pairs of the step.
        unplaced: The baseline's entries of sites whose rows could not be brought together.
        most: Gives the most rows that rounding may turn of a number of rows, after the pairs seen so far; and for a
            choice that is `computed`, if the second argument is true.
    """

    def __init__(
        self, pairs: Sequence[Pair], unplaced: Iterable[MergedSite] = (), *, most: Callable[[int, bool], float]
    ) -> None:
        self._choices = [*choices(pairs), *_unknown(unplaced)]
        self._most = most
        self._explained: dict[Choice, bool] = {}  # whether rounding may have turned so many, for those come to

    @property
    def explained(self) -> list[Choice]:
        """The choices so far that rounding turned."""
        return [one for one, explained in self._explained.items() if explained and one.turned]

    def at(self, pair: Pair) -> Choice | None:
        """The choice of rows that a module computes, if rounding turned a part of it: then rows do not correspond."""
        if not self._choices:
            return None
        of_module = (one for one in self._before(pair) if one.gathered and pair.baseline.key.path in one.chosen)
        return next(of_module, None)

    def floor(self, pair: Pair, *, inputs: float, precision: float) -> float:
        """Floor of a tensor because of choices that rounding turned; 0 if none shows. More may hide than show.

        Args:
            pair: An output of a module, or the gradient of one.
            inputs: Relative difference at the inputs.
            precision: Rounding of what a choice compares, if that is not observed.
        """
        if not self._choices:
            return 0.0
        key, summary = pair.baseline.key, pair.baseline.summary
        power, shares = float(summary["sum_of_squares"]), [0.0]
        gradient = key.phase == "backward" and power > 0.0
        peak = float(largest(summary)) ** 2 * int(summary["count"]) / power if gradient else 1.0
        rows = math.prod(pair.baseline.shape[:-1])
        for one in self._before(pair):
            if one.by_scores and key.path == one.where:
                continue
            hidden = one.rows * (max(inputs, precision) if one.computed else inputs)
            shares.append(one.share(hidden if hidden >= SEEN_FLIPS else 0.0, key.path, rows, peak))
        return math.sqrt(max(shares))

    def _before(self, pair: Pair) -> Iterator[Choice]:
        """Choices before a pair that were made otherwise, and no more of them than their inputs explain.

        Each is held against its inputs at the first pair after it: later differences may follow from the choice.
        """
        before = (one for one in self._choices if one.order <= pair.baseline.order)
        for one in before:
            if self._explained.setdefault(one, one.turned <= self._most(one.rows, one.computed)):
                yield one


def choices(pairs: Sequence[Pair]) -> list[Choice]:
    """The choices of a step that were made otherwise.

    They show in the whole numbers that a router returns, in its scores if it sets those of other experts to zero, in
    the numbers of rows that experts get, in the rows of zeros that are left where an expert was not chosen, and in rows
    that two experts have exchanged.
    """
    forward = {pair.baseline.key.path: pair.baseline.order for pair in pairs if pair.baseline.key.phase == "forward"}
    return [*_by_numbers(pairs), *_by_scores(pairs), *_by_rows(pairs), *_by_zeros(pairs, forward), *_by_exchange(pairs)]


def _by_numbers(pairs: Sequence[Pair]) -> Iterator[Choice]:
    first: dict[tuple[str, int], int] = {}  # by call of a module: the place of its first output
    for pair in pairs:
        if (key := pair.baseline.key).phase == "forward":
            first.setdefault((key.path, key.call), pair.baseline.order)
    for pair in pairs:
        entry = pair.baseline
        if not _may_be_choices(entry) or pair.candidate.shape != entry.shape or equal_bits(pair):
            continue
        # At least one. Whole numbers have no sketch, so nothing tells how many.
        order = first[entry.key.path, entry.key.call]  # it may return the rows that were chosen before their numbers
        rows = int(entry.summary["count"])
        sorted_by_choice = dict.fromkeys(_inside_with(rows, entry, pairs), rows)
        yield Choice(
            order=order, where=entry.key.path, rows=rows, turned=1, computed=order < entry.order,
            chosen=sorted_by_choice, gathered=bool(sorted_by_choice),
        )  # fmt: skip


def _by_scores(pairs: Iterable[Pair]) -> Iterator[Choice]:
    """Scores that are zero but for the experts that each row chose, and differ by at least a row's worth."""
    for pair in pairs:
        entry, shape = pair.baseline, pair.baseline.shape
        if entry.key.phase != "forward" or len(shape) < 2 or not 1 < shape[-1] <= MOST_CHOICES:
            continue
        rows, zeros = math.prod(shape[:-1]), [int(one.summary["zero"]) for one in (entry, pair.candidate)]
        several, rest = divmod(rows * shape[-1] - zeros[0], rows) if rows else (0, 0)
        if rest or zeros[0] != zeros[1] or not 1 <= several <= min(MOST_OF_A_ROW, shape[-1] - 1):
            continue
        if pair.candidate.shape == shape and not equal_bits(pair) and _has_other_rows(pair):
            apart = float(distance(entry.summary, pair.candidate.summary)) ** 2 / float(entry.summary["sum_of_squares"])
            turned = max(1, round(apart * rows / 2.0))
            path, count = entry.key.path, rows * several
            yield Choice(
                order=entry.order, where=path, rows=count, turned=turned, chosen={path: count}, gathered=True,
                by_scores=True,
            )  # fmt: skip


def _may_be_choices(entry: MergedSite) -> bool:
    """True for whole numbers that a module returns, a few for each row."""
    shape = entry.shape
    whole = entry.key.phase == "forward" and entry.dtype not in UNIT_ROUNDOFF
    return whole and bool(shape) and (len(shape) == 1 or shape[-1] <= MOST_CHOICES)


def _inside_with(rows: int, router: MergedSite, pairs: Iterable[Pair]) -> Iterator[str]:
    """Modules beside a router, or inside its neighbours, that get a row for each choice.

    Experts whose weights are one tensor get all rows, sorted by expert: one choice that turned moves all rows between.
    """
    around = router.key.path.rpartition(".")[0]
    for entry in (pair.baseline for pair in pairs):
        is_later = entry.key.phase == "forward" and entry.order > router.order
        is_inside = entry.key.path.startswith(f"{around}." if around else "")
        if is_later and is_inside and len(entry.shape) == 2 and entry.shape[0] == rows:
            yield entry.key.path


def _unknown(unplaced: Iterable[MergedSite]) -> Iterator[Choice]:
    """Choices of rows that the runs have in another order, or divide among other micro-steps."""
    for entry in unplaced:
        if _may_be_choices(entry):
            yield Choice(order=entry.order, where=entry.key.path, rows=int(entry.summary["count"]), turned=0)


def _by_rows(pairs: Iterable[Pair]) -> Iterator[Choice]:
    """Siblings that get other numbers of rows in the two runs, and the same in all."""
    forward = (pair for pair in pairs if pair.baseline.key.phase == "forward" and pair.baseline.shape)
    for siblings in _siblings(pair for pair in forward if len(pair.baseline.shape) == len(pair.candidate.shape)):
        changes = [pair.candidate.shape[0] - pair.baseline.shape[0] for pair in siblings]
        turned = sum(map(abs, changes)) // 2
        if turned and sum(changes) == 0:
            first = min(siblings, key=lambda pair: pair.baseline.order).baseline
            chosen = {pair.baseline.key.path: pair.baseline.shape[0] for pair in siblings}
            yield Choice(
                order=first.order, where=first.key.path, rows=sum(chosen.values()), turned=turned, chosen=chosen,
                gathered=True,
            )  # fmt: skip


def _by_zeros(pairs: Iterable[Pair], forward: Mapping[str, int]) -> Iterator[Choice]:
    """Siblings of which other numbers of rows are zero in the two runs, such as the gradients of experts.

    A row that one expert lost has gone to another. If not so, rounding has left nothing of a row that is zero
    mathematically, such as the gradient of a query that can only look at itself.
    """
    for siblings in _siblings(pair for pair in pairs if _zero_rows(pair) and pair.baseline.key.path in forward):
        zeros = {pair.baseline.key.path: _zero_rows(pair) for pair in siblings}
        changes = [candidate - baseline for baseline, candidate in zeros.values()]
        if any(changes) and sum(changes) == 0:
            first, rows = min(zeros, key=lambda path: forward[path]), math.prod(siblings[0].baseline.shape[:-1])
            chosen = {path: rows - baseline for path, (baseline, _) in zeros.items()}
            yield Choice(
                order=forward[first], where=first, rows=rows, turned=sum(map(abs, changes)) // 2, chosen=chosen
            )


def _by_exchange(pairs: Sequence[Pair]) -> Iterator[Choice]:
    """Experts that get as many rows in both runs, but not the same: one row came for another that went elsewhere.

    Then all rows between the two stand in other places: at least two experts differ by more than a row, with about the
    same norm, and others do not differ. That these are experts, and no layers one behind the other, shows in their
    numbers of rows: these vary, and together they are a multiple of those of a router before them.
    """
    forward = [pair for pair in pairs if pair.baseline.key.phase == "forward" and len(pair.baseline.shape) > 1]
    flat = [pair for pair in forward if len(pair.baseline.shape) == 2 and pair.candidate.shape == pair.baseline.shape]
    for siblings in _siblings(flat):
        counts = {pair.baseline.key.path: pair.baseline.shape[0] for pair in siblings}
        if len(set(counts.values())) == 1:
            continue
        first = min(siblings, key=lambda pair: pair.baseline.order).baseline
        if not any(_routes(pair.baseline, siblings, rows=sum(counts.values()), to=first.order) for pair in forward):
            continue
        exchanged = {pair.baseline.key.path: pair.baseline.shape[0] for pair in siblings if _has_other_rows(pair)}
        if 2 <= len(exchanged) < len(siblings):
            yield Choice(
                order=first.order, where=first.key.path, rows=sum(counts.values()), turned=2, chosen=exchanged,
                gathered=True,
            )  # fmt: skip


def _routes(entry: MergedSite, experts: Sequence[Pair], *, rows: int, to: int) -> bool:
    """True if a tensor before the experts has a column for each, and each of its rows was given to as many of them."""
    own = math.prod(entry.shape[:-1])
    several = own > 0 and rows % own == 0 and rows // own <= MOST_OF_A_ROW
    return entry.order < to and len(experts) <= entry.shape[-1] <= MOST_CHOICES and several


def _has_other_rows(pair: Pair) -> bool:
    """True if two tensors differ by at least a row's worth, but hardly in their norms."""
    before, after = (float(entry.summary["sum_of_squares"]) for entry in (pair.baseline, pair.candidate))
    rows = math.prod(pair.baseline.shape[:-1])
    if not (rows and before and after) or abs(after - before) > _FEW_ROWS * before / rows:
        return False
    return rows * float(distance(pair.baseline.summary, pair.candidate.summary)) ** 2 >= _ONE_ROW * before


def _siblings(pairs: Iterable[Pair]) -> Iterable[Sequence[Pair]]:
    """Pairs whose paths differ in one number only (`experts.0`, `experts.1`), with rows of the same shape."""
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        key, path = pair.baseline.key, f".{pair.baseline.key.path}"
        for found in re.finditer(r"(?<=\.)\d+(?=\.|$)", path):
            pattern = (path[: found.start()], path[found.end() :], key.phase, key.slot, key.call)
            groups.setdefault((*pattern, pair.baseline.shape[1:]), []).append(pair)
    return [siblings for siblings in groups.values() if len(siblings) > 1]


def _zero_rows(pair: Pair) -> tuple[int, ...]:
    """Number of rows that are zero in each run; empty if zeros are not whole rows in both, or there are none."""
    shape = pair.baseline.shape
    if pair.baseline.key.phase not in ("forward", "backward") or len(shape) < 2 or pair.candidate.shape != shape:
        return ()
    zeros = [int(entry.summary["zero"]) for entry in (pair.baseline, pair.candidate)]
    if shape[-1] < 2 or not all(zeros) or any(count % shape[-1] for count in zeros):
        return ()
    return tuple(count // shape[-1] for count in zeros)
