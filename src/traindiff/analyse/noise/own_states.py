"""States of optimizers with code of their own that average quotients, as those of LaProp and AdaMod do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.noise.gradients import NOISE_SIZE
from traindiff.analyse.noise.run_floors import RunFloors
from traindiff.core.summary import largest, norm_of, rounding

FEW = 4
"""With fewer elements, two terms explain too much of anything."""

ALIKE = 0.01
"""A sketch is what it is compared with to this part: some states are kept in bfloat16."""

NEAREST = math.pi / math.sqrt(6.0)
"""The norm of 1, 1/2, 1/3, ...: elements close to zero lie about evenly, and these are their relative errors."""


class OwnStates:
    """Finds out which states average quotients such as g / |g| or 1 / |g|, from the baseline's sketches.

    The name of a state does not tell: LaProp's `exp_avg` averages quotients, and AdaMod keeps averages of learning
    rates. A state is taken for one only if that is known; until then it has the floor of an average of gradients.

    Args:
        run: Carried from step to step; its `quotients` is written.
        parameters: By path: the parameters as the step found them.
        pairs: All pairs of the step.
    """

    def __init__(self, run: RunFloors, parameters: Mapping[str, Pair], pairs: Iterable[Pair]) -> None:
        self._run = run
        self._parameters = parameters
        self._gradients: dict[str, Pair] = {}
        self._updates: dict[str, MergedSite] = {}
        self._states: dict[str, list[MergedSite]] = {}
        for pair in pairs if run.own_code else ():
            key = pair.baseline.key
            if key[:2] == ("grad", "") and key.slot == "grad":
                self._gradients[key.path] = pair
            elif key[:2] == ("update", ""):
                self._updates[key.path] = pair.baseline
            elif key.phase == "optimizer" and not key.group:
                self._states.setdefault(key.path, []).append(pair.baseline)

    def floor(self, pair: Pair, error: float) -> float:
        """Floor of a state that averages quotients; 0 for all others.

        An element of such a quotient has the relative error of the gradient's element. That is largest where the
        gradient is closest to zero, and an element that turns around moves by twice its size.

        Args:
            pair: A state of an optimizer, or anything else.
            error: Largest relative difference of the gradients of its parameter so far.
        """
        key, size = pair.baseline.key, norm_of(pair.baseline.summary)
        gradient = self._gradients.get(key.path)
        if gradient is None or not (error and size and self.is_quotient(pair.baseline)):
            return 0.0
        typical = norm_of(gradient.baseline.summary) / math.sqrt(int(gradient.baseline.summary["count"]))
        closest = min(float(one.summary["smallest"]) for one in (gradient.baseline, gradient.candidate))
        relative = NOISE_SIZE * error * typical / closest
        return float(largest(pair.baseline.summary)) / size * min(NEAREST * relative, 2.0 * math.sqrt(relative))

    def is_quotient(self, state: MergedSite) -> bool:
        """True for a state that averages quotients.

        It is decided in the first step that has the state, if that or another one of the parameter shows that its
        states begin there. So states of a continued training are none.
        """
        key = state.key
        if key.phase != "optimizer" or key.path not in self._run.own_code or self._run.mixing:
            return False
        if key not in self._run.quotients and 0.0 < norm_of(state.summary) < math.inf:
            self._run.quotients[key] = self._decided(state)
        return self._run.quotients.get(key, False)

    def _decided(self, state: MergedSite) -> bool:
        path = state.key.path
        gradient = self._gradients.get(path)
        if gradient is None or path not in self._parameters or gradient.baseline.shape != state.shape:
            return False
        if int(state.summary["count"]) < FEW or self._run.states.get(state.key) or self._is_average(state):
            return False
        begins = any(map(self._is_average, self._states[path]))
        return begins and _spread(state) <= (1.0 + ALIKE) * _spread(gradient.baseline)

    def _is_average(self, state: MergedSite) -> bool:
        """True for a multiple of the gradient, of its absolute values or of its squares, or of the moved parameter."""
        gradient = self._gradients[state.key.path].baseline
        size, most = norm_of(state.summary), float(largest(state.summary))
        power, of_gradient = float(gradient.summary["sum_of_squares"]), float(largest(gradient.summary))
        if gradient.shape != state.shape or not (size and of_gradient):
            return False
        if int(state.summary["negative"]) == 0:  # the largest element has the same share, to rounding: it is one number
            squares = most / float(state.summary["sum"]) * power / of_gradient**2
            absolute = most / size * math.sqrt(power) / of_gradient
            return min(abs(squares - 1.0), abs(absolute - 1.0)) < 2.0 * rounding(state.dtype)
        return _left_over(state, *self._moved(state.key.path), gradient.summary["sketch"]) <= ALIKE

    def _moved(self, path: str) -> list[Any]:
        """Sketch of the parameter after the step, unless most of it is the update: that may itself be a quotient."""
        before, update = self._parameters[path].baseline, self._updates.get(path)
        if update is None or norm_of(before.summary) <= norm_of(update.summary):
            return []
        return [before.summary["sketch"] + update.summary["sketch"]]


def _spread(entry: MergedSite) -> float:
    """Ratio of the largest element to the smallest one that is not zero."""
    return float(largest(entry.summary)) / float(entry.summary["smallest"])


def _left_over(state: MergedSite, *terms: Any) -> float:
    """Norm of what remains of a state beside the best fit of some terms, as a part of its norm."""
    vector, together = state.summary["sketch"], np.stack(terms, axis=1)
    if not (np.isfinite(vector).all() and np.isfinite(together).all()):
        return math.inf
    sizes = np.sqrt(np.square(together).sum(axis=0))
    used = together[:, sizes > 0.0] / sizes[sizes > 0.0]
    left = vector - used @ np.linalg.lstsq(used, vector, rcond=None)[0]
    return float(np.sqrt(left @ left)) / norm_of(state.summary)
