"""Errors of batch statistics: the same for all rows of a channel, so that they do not average out in sums of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import SiteKey
from traindiff.analyse.noise.gradients import Terms
from traindiff.analyse.noise.measured import SAFETY
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of

HANDED_ON = 2.0
"""Multiple of a coherent error that the operations between it and a sum of rows may make of it."""

KERNELS = 4.0
"""Roundings per row of a kernel that sums the rows of a gradient, as a multiple of sqrt(rows) u."""


def canceled_means(pairs: Iterable[Pair]) -> dict[SiteKey, float]:
    """How much more cancels in running means than in their terms, by site; at least 1.

    What follows a normalization, through linear layers alone, has means that are mathematically zero: the inverted
    bottlenecks of MobileNet and EfficientNet. Only rounding is left of them. Their terms are as large as the running
    variance says.

    Args:
        pairs: Of a step.
    """
    buffers = {pair.baseline.key: pair.baseline.summary for pair in pairs if pair.baseline.key.slot == "buffer"}
    found = {}
    for key, mean in buffers.items():
        module, _, name = key.path.rpartition(".")
        variance = buffers.get(key._replace(path=f"{module}.running_var")) if name == "running_mean" else None
        size = norm_of(mean)
        terms = math.sqrt(max(0.0, float(variance["sum"]))) if variance is not None else 0.0
        if 0.0 < size <= terms * UNIT_ROUNDOFF["bfloat16"]:  # what is larger is no rounding in any dtype
            found[key] = math.hypot(terms, size) / size
    return found


class CoherentErrors:
    """Noise floors of what follows from statistics over the rows of a batch, in one step.

    A kernel that sums one row after the other is off by up to sqrt(rows) u. This error of a BatchNorm's mean and
    variance is one number per channel, added to every row of the channel. Where n rows are summed (gradients of weights
    and biases, mean pooling), the sum of independent values grows as sqrt(n), and this error as n. So its relative size
    grows by sqrt(n), and by the cancellation of the sum. Weights that were updated by such gradients differ coherently
    in turn, and an output sums over its inputs. Measured with torch's BatchNorm on the CPU in channels_last: 11 times
    the floor of independent errors for a convolution's weight over 16,384 rows.

    Args:
        terms: By path of the module: the terms that its bias sums, with the elements that norms take means of.
        parameters: By path: the parameters as the step found them, on both sides.
    """

    def __init__(self, terms: Mapping[str, Terms], parameters: Mapping[str, Pair]) -> None:
        self._terms = terms
        self._parameters = parameters
        normalized = [one for one in terms.values() if one.summed]
        u = UNIT_ROUNDOFF["float32"]  # in which kernels sum, also for shorter dtypes
        self._own = max((SAFETY * math.sqrt(one.summed) * u for one in normalized), default=0.0)
        self._most = max((one.count for one in normalized), default=0)

    def __bool__(self) -> bool:
        """True if the step has batch statistics."""
        return bool(self._own)

    def floor(self, pair: Pair, inputs: float, own: float) -> float:
        """Floor of a pair because of coherent errors; 0 in a step without batch statistics.

        Args:
            pair: Both sides.
            inputs: Relative difference that was measured at the inputs: as much of it may be coherent, up to what
                such a kernel makes.
            own: Relative difference of the module's own parameters, for an output.
        """
        if not self or UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0) < UNIT_ROUNDOFF["float32"]:
            return 0.0
        key, carried = pair.baseline.key, HANDED_ON * min(self._own, inputs)
        if key.phase == "backward":
            return self._own if key.path else 0.0
        if key.phase == "forward":
            count = max(1, int(pair.baseline.summary["count"]))
            pooled = carried * math.sqrt(self._most / count) if count < self._most else 0.0
            return max(pooled, own * math.sqrt(self._summed_inputs(key.path)))
        if key.phase == "grad" and key.slot == "grad":
            return self._of_gradient(pair, carried)
        return 0.0

    def _of_gradient(self, pair: Pair, carried: float) -> float:
        terms, shape = self._terms.get(pair.baseline.key.path.rpartition(".")[0]), pair.baseline.shape
        if terms is None or not shape or not shape[0]:
            return 0.0
        size, rows = norm_of(pair.baseline.summary), max(1.0, terms.count / shape[0])
        cancellation = max(1.0, terms.norm / size) if len(shape) == 1 and size else 1.0
        own = SAFETY * KERNELS * math.sqrt(rows) * UNIT_ROUNDOFF["float32"] * cancellation
        summed = math.sqrt(max(1.0, self._most / terms.count)) if terms.count else 1.0
        return own + carried * max(math.sqrt(rows) * cancellation, summed)

    def _summed_inputs(self, path: str) -> float:
        """Number of inputs that an output of a module sums over, by the shape of its weight."""
        weight = self._parameters.get(f"{path}.weight")
        shape = () if weight is None else weight.baseline.shape
        return float(math.prod(shape[1:])) if len(shape) > 1 else 0.0
