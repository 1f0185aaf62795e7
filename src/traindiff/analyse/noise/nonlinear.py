"""Updates that are no linear combination of gradients, states and parameters, such as orthogonalized ones and signs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from traindiff.analyse.merge.distance import Pair, equal_bits
from traindiff.analyse.noise.run_floors import RunFloors
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of

LEFT_OVER = 0.1
"""A linear update leaves less than this of its norm beside its terms, apart from the rounding of the parameter.
Measured on the CPU in float32: SGD with momentum, weight decay and Nesterov at most 1e-4, Muon at least 0.4."""

FEW = 16
"""With fewer elements, three terms explain too much of anything."""


def _is_square(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and shape[-2] == shape[-1] > 1


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
        square: list[Pair] = []
        for pair in pairs:
            key = pair.baseline.key
            if key[:2] == ("grad", "") or key.phase == "optimizer":
                self._terms.setdefault(key.path, []).append(pair)
                if key.phase == "optimizer" and not key.group and _is_square(pair.baseline.shape):
                    square.append(pair)
        self._note_preconditioners(square)

    def _note_preconditioners(self, square: Sequence[Pair]) -> None:
        """Note which square states are no matrices of a parameter's elements, and where they differ in bits.

        Beside a square parameter, their shape does not tell. Then their slot does, beside any other parameter.
        """
        for pair in square:
            own = self._parameters.get(pair.baseline.key.path)
            if own is not None and own.baseline.shape != pair.baseline.shape:
                self._run.preconditioners.add(pair.baseline.key.slot)
        self._run.preconditioned.update(
            pair.baseline.key.path
            for pair in square
            if pair.baseline.key.slot in self._run.preconditioners and not equal_bits(pair)
        )

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
