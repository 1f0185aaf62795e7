"""How far apart two correct runs may be at a site, as far as that follows from rounding alone.

These floors are *uncalibrated*: they come from the dtypes and from the differences measured at a
site's inputs, not from replicas of the baseline. Two ideas carry them:

* One operation in a dtype of unit roundoff u gives results that differ by `c * u` when it is computed
  in another order. c is 32 for float32 and float64, whose errors grow with the length of a
  reduction, and 2 for shorter dtypes, which accumulate in a longer one: two runs that round the
  same number once differ by 2 u at most (and by 0.6 u in relative L2, which leaves room for operations
  that round several times).
* What enters an operation with a relative difference e may leave it with `GAIN * e`. So a site is
  judged against the differences *measured* at its inputs: noise may grow from site to site and
  from step to step, a jump is a finding ("inputs agree, output does not").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from traindiff.core.summary import UNIT_ROUNDOFF, largest, rounding

GAIN = 8.0
"""How much one observed operation may enlarge the relative difference of its inputs."""

REPEATED = 1.5
"""How much more than an operation a parameter's gradient rounds: a recurrent cell adds it up position by position,
in the dtype it computes in. Measured with torch's GRU on the CPU: 2 roundings in bfloat16, over 12 positions."""

ADAPTIVE_GAIN = 30.0
"""The same for the square root law of adaptive optimizers; see `Floors.update`."""


@dataclass(slots=True)
class Floors:
    """Floors of one step, fed with the differences measured so far in it.

    Attributes:
        parameters: Relative difference of all parameters together, as the step found them.
        own: The same per module, of the parameters that it owns.
        gradients: Largest relative difference of each parameter's gradients so far in the run.
        states: Largest relative difference of the state that each optimizer keeps of a parameter, in this step.
        precision: Largest rounding of a dtype that has been observed on the way of the data.
        flow: Largest relative difference on the way of the data.
        settings_differ: Whether the optimizers are set differently, so that states and updates must differ.
        coefficients: Relative error of an optimizer's own coefficients, such as 1 - beta.
    """

    parameters: float = 0.0
    own: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)
    precision: float = 0.0
    flow: float = 0.0
    settings_differ: bool = False
    coefficients: float = 0.0

    def activation(self, path: str, dtypes: Iterable[str]) -> float:
        """Floor of an output of a module, or of the gradient of one."""
        self.precision = max(self.precision, *(rounding(dtype) for dtype in dtypes))
        inputs = max(self.flow, self.parameters, self.own.get(path, 0.0))
        return max(self.precision, GAIN * inputs)

    def gated(self, baseline: Any, candidate: Any) -> float:
        """Floor of a gradient that came back through gates: ReLU, max pooling, a router.

        A gate whose input lies within its own error of the threshold may stand open in one run and
        shut in the other, and the whole element then differs: relative to the tensor, sqrt(k / n)
        for k of n elements. Gates that are shut leave exact zeros. k is the change in their number, plus
        what opened and shut without changing it: of elements of unit size about a share e lies
        within e of a threshold. Below a tenth of an element that is left out: two flips that hide
        each other then have a chance of less than 1 %.

        Args:
            baseline: The baseline's summary.
            candidate: The candidate's.
        """
        zeros, count = (int(baseline["zero"]), int(candidate["zero"])), int(baseline["count"])
        power = float(baseline["sum_of_squares"])
        if not all(zeros) or zeros[0] == count or not power or math.isinf(self.flow):
            return 0.0
        hidden = count * max(self.flow, self.parameters)
        flips = abs(zeros[0] - zeros[1]) + (hidden if hidden >= 0.1 else 0.0)
        # Their mean square, and how far a few of them may lie from it.
        mean, most = power / (count - zeros[0]), float(largest(baseline)) ** 2
        return math.sqrt((flips * mean + math.sqrt(flips) * most) / power)

    def gradient(self, cancellation: float, *, dtype: str = "", terms: float = 1.0, accumulated: int = 0) -> float:
        """Floor of a parameter's gradient.

        Args:
            cancellation: Norm of the terms that were added up, over the norm of their sum. It is
                large for a gradient that is mathematically zero, e.g. of a key bias: what is left
                of it is rounding, and as large as the rounding of its terms.
            dtype: Dtype of the gradient.
            terms: How many terms were added up element by element, as for biases and norms. Their sum is
                good to sqrt(terms) u, and not every kernel adds in a longer dtype. Measured with torch on
                the CPU, for 128 to 500,000 terms: 0.25 sqrt(terms) u in bfloat16 (LayerNorm), and in
                float32 up to 0.4 sqrt(terms) u of the terms' norm (a bias before BatchNorm).
            accumulated: Micro-batches whose gradients were added up in `dtype`, one after the other.
        """
        u = UNIT_ROUNDOFF.get(dtype, 0.0)
        precision = max(self.precision, rounding(dtype))  # where activations were not recorded, its own
        own, several = math.sqrt(terms) * u, REPEATED * precision + accumulated * u
        return max(several, own, GAIN * max(self.flow, self.parameters)) * max(1.0, cancellation)

    def state(self, path: str, dtypes: Iterable[str]) -> float:
        """Floor of an optimizer's state of a parameter: linear (or quadratic) in its gradients."""
        if self.settings_differ:
            return math.inf
        local = max((rounding(dtype) for dtype in dtypes), default=0.0)
        return max(local, self.precision, self.coefficients, GAIN * self.gradients.get(path, 0.0))

    def update(self, path: str, dtype: str, *, adaptive: bool, storage: float) -> float:
        """Floor of a parameter's update.

        The first update of an adaptive optimizer is the *sign* of the gradient: every element
        smaller than its own error goes either way. A relative error e flips a share of about e of the
        elements, and that is a relative difference of order sqrt(e). What the optimizer itself rounds, in its
        state, is an error of each element and flips nothing.

        Args:
            path: The parameter.
            dtype: Its dtype.
            adaptive: Whether the optimizer divides by a moment of the gradient.
            storage: Norm of the parameter over norm of its update: an update is stored only to the
                rounding of the parameter that it is added to, and is lost if it is smaller.
        """
        if self.settings_differ:
            return math.inf
        gradient, state = self.gradients.get(path, 0.0), max(self.states.get(path, 0.0), rounding(dtype))
        own = ADAPTIVE_GAIN * math.sqrt(gradient) if adaptive else GAIN * gradient
        return max(own, GAIN * state, 2.0 * UNIT_ROUNDOFF.get(dtype, 0.0) * (1.0 + storage))

    def factor(self, path: str, dtypes: Iterable[str], *, left_over: float, storage: float) -> float:
        """Floor of a difference that is a constant factor and nothing else.

        Where a floor is higher than what came in explains, it stands for noise without a direction: canceled
        sums, gates, signs of small gradients. Such noise does not multiply a tensor by a constant.
        It leaves a residual beside the best-fitting multiple of the baseline, and that measures it.

        Args:
            path: The module or parameter.
            dtypes: Dtypes of both sides.
            left_over: Norm of that residual over the candidate's norm.
            storage: For an update: norm of the parameter over norm of its update.
        """
        units = [UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes]
        incoming = max(left_over, self.flow, self.parameters, self.gradients.get(path, 0.0))
        return max(
            self.precision,
            self.coefficients,
            *map(rounding, dtypes),
            GAIN * incoming,
            2.0 * max(units) * (1.0 + storage),
        )

    def scalar(self, terms: int) -> float:
        """Floor of a number that was reduced from many: `sqrt(N) * u`, or what its terms bring in."""
        reduction = math.sqrt(max(1, terms)) * UNIT_ROUNDOFF["float32"]
        return max(self.precision, reduction, GAIN * max(self.flow, self.parameters))

    def saw(self, difference: float) -> None:
        """A relative difference was measured on the way of the data."""
        if math.isfinite(difference):
            self.flow = max(self.flow, difference)
        else:
            self.flow = math.inf

    def saw_state(self, path: str, difference: float) -> None:
        """A relative difference of an optimizer's state of a parameter was measured."""
        self.states[path] = max(self.states.get(path, 0.0), difference)

    def saw_gradient(self, path: str, difference: float) -> None:
        """A relative difference of a parameter's gradient was measured."""
        self.gradients[path] = max(self.gradients.get(path, 0.0), difference)
