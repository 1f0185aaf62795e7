"""Noise of activations that cannot be compared.

Samples are in another order, the runs cut the batch differently, or what happens inside was not recorded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from traindiff.analyse.align.pairs import Aligned
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.uncalibrated import GAIN, SEEN_FLIPS, Floors
from traindiff.core.summary import UNIT_ROUNDOFF, rounding


class UnseenNoise:
    """Expects how far rounding on the data's path moves what is computed at its end.

    Losses and gradients do not depend on the order of samples, so they are still compared. But the differences that
    lead to them are unknown.
    """

    def __init__(self) -> None:
        self._squares = 0.0
        self._coarsest = 0.0
        self._gates = 0  # elements of the largest gradient of which gates have set some to zero

    def saw(self, pair: Pair) -> None:
        """Note a site on the data's path."""
        summary, dtypes = pair.baseline.summary, (pair.baseline.dtype, pair.candidate.dtype)
        once = max(rounding(dtype) for dtype in dtypes)
        self._squares += (once / 2) ** 2
        self._coarsest = max(self._coarsest, once)
        if pair.baseline.key.phase == "backward" and _is_gated(pair.baseline):
            self._gates = max(self._gates, int(summary["count"]))

    def behind(self, flow: float, *, floor: float, dtype: str) -> float:
        """Relative L2 difference to expect behind the noted sites; 0 if the `flow` of differences there is known.

        Each differs by half of an operation's floor, independently: n of them add up to sqrt(n) times that. Gates
        (ReLU) turn a relative error e of their inputs into about a share e of elements that differ as a whole; see
        `Floors.gated`. What cancels raises its own rounding, and as much that of the sites before it.

        Args:
            flow: Largest difference of what leads to a site; infinite if that is unknown.
            floor: The site's own floor.
            dtype: The site's dtype.
        """
        once = max(rounding(dtype), self._coarsest)  # a floor under autocast is that of the shorter dtype
        if not (math.isinf(flow) and once):
            return 0.0
        rounded = math.sqrt(self._squares)
        gated = math.sqrt(rounded) if rounded * self._gates >= SEEN_FLIPS else rounded
        return gated * max(1.0, floor / once)


_MARGIN = 3.0
"""Gradients behind unplaced sites, as a multiple of the expected noise there: gates and sums that cancel add to it."""


class UnplacedNoise:
    """Expects the noise on the data's path at sites whose rows two runs cut differently.

    Each adds half of an operation's floor, independently, as in `UnseenNoise`: n of them add up to sqrt(n) times that.
    What is computed behind them, above all the gradients of parameters, may differ by `_MARGIN` times as much.

    Args:
        sites: The baseline's entries, in execution order.
    """

    def __init__(self, sites: Sequence[MergedSite]) -> None:
        flowing = [site for site in sites if site.key.phase != "batch"]
        units = [rounding(site.dtype) for site in flowing]
        self._orders = [site.order for site in flowing]
        self._precision = list(accumulate(units, max))
        self._squares = list(accumulate((unit / 2) ** 2 for unit in units))

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self._orders)

    def enter(self, floors: Floors, *, until: int, flows: bool) -> None:
        """Enter those up to a place in execution order into floors; their noise only if differences flow on."""
        passed = bisect_right(self._orders, until)
        if passed:
            floors.precision = max(floors.precision, self._precision[passed - 1])
            floors.saw(_MARGIN / GAIN * math.sqrt(self._squares[passed - 1]) if flows else 0.0)


_ACTIVATIONS = ("forward", "backward")


_STRETCH = 4
"""Fewer activations in a row that one run alone shows are left to the gain of one operation, as in a fused layer."""


def hidden_activations(aligned: Aligned, place: Callable[[int], int]) -> tuple[MergedSite, ...]:
    """Stretches of activations, or of their gradients, that one run alone has observed, in the baseline's order.

    The other run computes something in their place, unless it is wrong: compiled code that calls no hooks, fused
    modules, or modules that are called by their `forward`. A stretch ends where both runs show the same site.

    Args:
        aligned: The sites of a step.
        place: Maps places in the candidate's execution order to the baseline's; see `pairs.in_baseline_order`.
    """
    moved = (replace(entry, order=place(entry.order)) for entry in aligned.only_candidate)
    found = [*aligned.only_baseline, *moved]
    common = []
    for pair in aligned.pairs:
        if pair.candidate.unobserved:
            found.append(pair.baseline)
        elif pair.baseline.unobserved:
            found.append(replace(pair.candidate, order=pair.baseline.order))
        elif pair.baseline.key.phase in _ACTIVATIONS:
            common.append(pair.baseline.order)
    hidden = [entry for entry in found if entry.key.phase in _ACTIVATIONS and not (entry.key.stage or entry.unobserved)]
    if not hidden:  # as a rule
        return ()
    common.sort()
    hidden.sort(key=lambda entry: entry.order)
    stretches = (list(one) for _, one in groupby(hidden, key=lambda entry: bisect_right(common, entry.order)))
    return tuple(entry for stretch in stretches if len(stretch) >= _STRETCH for entry in stretch)


_SITES_OF_A_MODULE = 2
"""Operations for each module that has parameters, where none of them was recorded."""

_LONG, _SHORT = 64.0, 1.0
"""Relative error at the inputs of hidden gates, in unit roundoffs of float32 or float64, and of shorter dtypes.

Measured by the gradients behind them: 120 in float32 behind the 7 gates of a ResNet with BatchNorm (channels last, on
the CPU), and less than 1 in a perceptron; 0.5 in bfloat16 behind 2, 4 and 12 gates."""

_GATED_MARGIN = 2.0
"""Gradients behind hidden gates, as a multiple of the expected noise."""


class HiddenPath:
    """Expects the noise of a model of which at least one run recorded nothing, or a part alone.

    What leads to a loss or to a gradient differs by more than what was recorded before it. Rounding inside adds up as
    in `UnplacedNoise`. Gates (ReLU, max pooling) that are in the hidden part turn a relative error e of their inputs
    into about a share e of elements that differ as a whole, see `Floors.gated`: n gates one after the other into a
    difference of sqrt(n e). Where neither run recorded gradients of activations, or the outputs of most modules, each
    of these may have one. Of activations whose rows are in no order, only norms and sums are compared, which hide gates
    that turn: of bfloat16 samples in another order, the gradient of a convolution behind max pooling has differed by
    2.4 x the noise that rounding alone explains.

    Args:
        pairs: All pairs of the step.
        hidden: See `hidden_activations`.
        unplaced: What both runs recorded, and of which only norms and sums are compared; see `UnplacedNoise`.
        computed_in: The shortest dtype to which autocast converts in one of the runs; empty without autocast.
        other_form: Whether both runs were given the same samples, padded or ordered otherwise.
        holders: Paths of modules that hold parameters and are never called: these are used by the module around them.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        hidden: Sequence[MergedSite],
        unplaced: Sequence[MergedSite],
        computed_in: str,
        *,
        other_form: bool = False,
        holders: Collection[str] = (),
    ) -> None:
        recorded = (*hidden, *unplaced, *(pair.baseline for pair in pairs))
        shown = [entry.key for entry in recorded if not entry.key.stage]
        phases, called = {key.phase for key in shown}, {key.path for key in shown if key.phase == "forward"}
        gradients = [pair for pair in pairs if pair.baseline.key.phase == "grad" and pair.baseline.key.slot == "grad"]
        dtypes = {entry.dtype for pair in gradients for entry in (pair.baseline, pair.candidate)}
        once = max((rounding(dtype) for dtype in (*dtypes, computed_in)), default=0.0)
        modules = {_user(pair.baseline.key.path, holders) for pair in gradients}
        silent = modules - called
        if 2 * len(silent) <= len(modules):  # some do not call, as the output projection of torch's attention
            silent = set()
        unknown = {phase: len(silent if phase in phases else modules) for phase in _ACTIVATIONS}
        self._squares = {phase: _SITES_OF_A_MODULE * number * (once / 2) ** 2 for phase, number in unknown.items()}
        self._precision = once if any(unknown.values()) else 0.0
        in_no_order = unplaced if other_form else ()
        behind = [*hidden, *(entry for entry in in_no_order if not _has_zero_rows(entry))]
        gated = [entry for entry in behind if entry.key.phase == "backward" and _is_gated(entry)]
        most = max((float(int(entry.summary["count"])) for entry in gated), default=0.0)
        self._elements = math.inf if unknown["backward"] else most
        self._since = 0 if unknown["backward"] else min((entry.order for entry in gated), default=0)
        self._gates = len(gated) + unknown["backward"]
        self._error = max(
            map(_error, (*dtypes, computed_in, *(entry.dtype for entry in (*hidden, *gated)))), default=0.0
        )
        self._entered: set[tuple[int, str]] = set()

    def __bool__(self) -> bool:
        """True if anything is hidden that no other floor knows of."""
        return bool(self._gates or any(self._squares.values()))

    def enter(self, floors: Floors, key: SiteKey, order: int, *, flows: bool) -> None:
        """Enter what is hidden before a site into floors, once; its noise only if differences flow on."""
        is_behind = key.phase not in ("batch", "dataloader", "param")
        self._once(floors, "forward", when=is_behind, flows=flows)
        is_backward = is_behind and key.phase not in ("forward", "loss") and order >= self._since
        self._once(floors, "backward", when=is_backward, flows=flows)

    def _once(self, floors: Floors, phase: str, *, when: bool, flows: bool) -> None:
        if not when or (id(floors), phase) in self._entered:
            return
        self._entered.add((id(floors), phase))
        floors.precision = max(floors.precision, self._precision)
        noise = _MARGIN * math.sqrt(self._squares[phase])
        if phase == "backward" and self._gates:
            error = max(self._error, floors.flow, GAIN * floors.parameters)
            if error * self._elements >= SEEN_FLIPS:
                noise = max(noise, _GATED_MARGIN * math.sqrt(self._gates * error))
        if flows:
            floors.saw(noise / GAIN)


def _user(parameter: str, holders: Collection[str]) -> str:
    """Path of the module that a parameter belongs to, and that may be called."""
    module = parameter.rpartition(".")[0]
    while module and module in holders:
        module = module.rpartition(".")[0]
    return module


def _error(dtype: str) -> float:
    u = UNIT_ROUNDOFF.get(dtype, 0.0)
    return u * (_LONG if u <= UNIT_ROUNDOFF["float32"] else _SHORT)


def _has_zero_rows(entry: MergedSite) -> bool:
    """True if its zeros may be whole rows, as of padding, which no gate has set."""
    return bool(entry.shape) and int(entry.summary["zero"]) % entry.shape[-1] == 0


def _is_gated(entry: MergedSite) -> bool:
    return 0 < int(entry.summary["zero"]) < int(entry.summary["count"])
