"""Updates that are no linear combination of gradients, states and parameters, such as orthogonalized ones and signs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.noise.run_floors import RunFloors
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of

LEFT_OVER = 0.1
"""A linear update leaves less than this of its norm beside its terms, apart from the rounding of the parameter.
Measured on the CPU in float32: SGD with momentum, weight decay and Nesterov at most 1e-4, Muon at least 0.4."""

FEW = 16
"""With fewer elements, three terms explain too much of anything."""


class NonlinearUpdates:
    """Finds out which parameters an optimizer updates by a function that is not linear, from the baseline's sketches.

    SGD adds up gradient, momentum and weight decay, so an error of these enters its update with the same relative size.
    Optimizers that divide by a moment are known by their state. Others have no such state: Muon makes all directions of
    a matrix equally long, also those that hold only noise, and a sign does the same with each element.

    Args:
        run: Carried from step to step; its `nonlinear`, `preconditioned` and `preconditioners` are written.
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
        sizes = np.sqrt(np.square(terms).sum(axis=0))
        if not np.isfinite(terms).all() or not np.isfinite(update).all():
            return False
        used = terms[:, sizes > 0.0] / sizes[sizes > 0.0]
        left = update - used @ np.linalg.lstsq(used, update, rcond=None)[0]
        most = LEFT_OVER + UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0) * storage
        return self._run.nonlinear.setdefault(key.path, float(np.sqrt(left @ left)) > most * size)
