"""Updates and states that are no averages of gradients, such as orthogonalized ones, signs and quotients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.noise.run_floors import RunFloors
from traindiff.core.summary import UNIT_ROUNDOFF, largest, norm_of

LEFT_OVER = 0.1
"""A linear update leaves less than this of its norm beside its terms, apart from the rounding of the parameter.
Measured on the CPU in float32: SGD with momentum, weight decay and Nesterov at most 1e-4, Muon at least 0.4."""

ALIKE = 0.01
"""A multiple of the gradient, or of its square, is one to this part: some are kept in bfloat16."""

STEPS = ("step",)
"""States that count."""

FEW = 16
"""With fewer elements, three terms explain too much of anything."""


class NonlinearUpdates:
    """Finds out which parameters an optimizer updates by a function that is not linear, from the baseline's sketches.

    SGD adds up gradient, momentum and weight decay, so an error of these enters its update with the same relative size.
    Optimizers that divide by a moment are known by their state. Others have no such state: Muon makes all directions of
    a matrix equally long, also those that hold only noise, and a sign does the same with each element.

    Args:
        run: Carried from step to step; its `nonlinear`, `quotients`, `preconditioned`, `preconditioners` are written.
        parameters: By path: the parameters as the step found them.
        pairs: All pairs of the step.
    """

    def __init__(self, run: RunFloors, parameters: Mapping[str, Pair], pairs: Iterable[Pair]) -> None:
        self._run = run
        self._parameters = parameters
        self._terms: dict[str, list[Pair]] = {}
        for pair in pairs:
            key = pair.baseline.key
            if key[:2] == ("grad", "") or key.phase == "optimizer":
                self._terms.setdefault(key.path, []).append(pair)
                if len(pair.baseline.shape) > 1 and not key.group:
                    self._note_preconditioner(pair)

    def _note_preconditioner(self, pair: Pair) -> None:
        key, (*_, rows, columns) = pair.baseline.key, pair.baseline.shape
        own = self._parameters.get(key.path)
        if key.phase == "optimizer" and rows == columns > 1 and own and own.baseline.shape != pair.baseline.shape:
            self._run.preconditioned.add(key.path)
            self._run.preconditioners.add(key.slot)

    def has(self, pair: Pair, storage: float) -> bool:
        """True for an update that is not linear.

        It is decided in the first step that moves the parameter. There momentum is the gradient, recorded or not.

        Args:
            pair: A pair of the step.
            storage: For an update: norm of the parameter over norm of its update.
        """
        key, before = pair.baseline.key, self._parameters.get(pair.baseline.key.path)
        if key.phase != "update" or self._run.mixing or key.path in self._run.adaptive or before is None:
            return False
        known = self._run.nonlinear.get(key.path)
        if known is not None:
            return known
        size, shape = norm_of(pair.baseline.summary), pair.baseline.shape
        gradients = [one for one in self._terms.get(key.path, ()) if one.baseline.shape == shape]
        if not size or not gradients or int(pair.baseline.summary["count"]) < FEW:
            return False
        terms = np.stack([one.baseline.summary["sketch"] for one in (before, *gradients)], axis=1)
        update = pair.baseline.summary["sketch"]
        if not np.isfinite(terms).all() or not np.isfinite(update).all():
            return False
        most = LEFT_OVER + UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0) * storage
        return self._run.nonlinear.setdefault(key.path, _left_over(update, terms) > most * size)

    def has_state(self, pair: Pair) -> bool:
        """True for a state of an optimizer of the user's own that may not average gradients or their squares.

        LaProp averages quotients, AdaMod averages learning rates, SPlus averages parameters; a name does not tell.
        It is decided in the first step that has the state: an average is a multiple of the gradient then, perhaps with
        weight decay, or of its square, whose largest element and whose sum have the same ratio.
        """
        key = pair.baseline.key
        if key.phase != "optimizer" or key.group or key.path not in self._run.own_code or key.slot in STEPS:
            return False
        known = self._run.quotients.get(key)
        if known is None and norm_of(pair.baseline.summary):
            known = self._run.quotients[key] = not self._is_average(pair)
        return bool(known)

    def _is_average(self, pair: Pair) -> bool:
        state = pair.baseline
        before = self._parameters.get(state.key.path)
        gradient = next(
            (one.baseline for one in self._terms.get(state.key.path, ()) if one.baseline.key.slot == "grad"), None
        )
        if gradient is None or before is None or gradient.shape != state.shape:
            return False
        power, size = float(gradient.summary["sum_of_squares"]), float(largest(gradient.summary))
        if not (power and math.isfinite(power)):
            return False
        if int(state.summary["negative"]) == 0:
            ratio = float(largest(state.summary)) / abs(float(state.summary["sum"])) * power / size**2
            if abs(ratio - 1.0) < ALIKE:
                return True
        terms = np.stack([before.baseline.summary["sketch"], gradient.summary["sketch"]], axis=1)
        return _left_over(state.summary["sketch"], terms) <= ALIKE * norm_of(state.summary)


def _left_over(vector: Any, terms: Any) -> float:
    """Norm of what remains of a vector beside the best fit of some terms, its columns."""
    sizes = np.sqrt(np.square(terms).sum(axis=0))
    used = terms[:, sizes > 0.0] / sizes[sizes > 0.0]
    left = vector - used @ np.linalg.lstsq(used, vector, rcond=None)[0]
    return float(np.sqrt(left @ left))
