"""Noise floors that follow from rounding alone, without replicas of the baseline.

These floors are *uncalibrated*: they follow from the dtypes and from the differences measured at a site's inputs. They
rest on two assumptions:

* One operation in a dtype of unit roundoff u gives results that differ by `c * u` if it is computed in another order. c
is 32 for float32 and float64, whose errors grow with the length of a reduction, and 2 for shorter dtypes, which
accumulate in a longer one: two runs that round the same number once differ by at most 2 u (0.6 u in relative L2, which
leaves room for operations that round several times).
* A relative difference e at the inputs of an operation may become `GAIN * e` at its output. So a site is judged against
the differences *measured* at its inputs: noise may grow from site to site and from step to step, and a jump is a
finding ("inputs agree, output does not").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from traindiff.analyse.merge.distance import Pair
from traindiff.core.summary import UNIT_ROUNDOFF, largest, rounding

GAIN = 8.0
"""Factor by which one observed operation may enlarge the relative difference of its inputs."""

BEYOND = 2.0
"""How far a difference may exceed what is computed from other ones: sketches estimate their sizes."""

LATER_GAIN = 2.0 * GAIN
_LATER_SUMS = 4.0 * GAIN
"""The same in longer dtypes where parameters differ: of activations, and of parameters' gradients. What a parameter
makes of a row, it makes of all, so a sum over rows may enlarge it further, step after step. Measured in small networks
of 250 steps: up to 10 and 11. In shorter dtypes, rounding is most of what differs, and is independent in each row."""

SEEN_FLIPS = 0.1
"""Gates that may turn without changing their number are left out below this: then two flips hide each other with a
chance of less than 1 %."""

_RARE_FLIPS = 0.002
"""Below this, gates do not turn unseen. Above it they rarely do, and then the difference is that of two elements."""

UNEVEN = 8.0
"""Gates that turn unseen, as a multiple of those that are expected to: where a training has fitted most rows, few are
left that have a gradient, and these differ most. Measured in classifiers of 50 to 250 steps: up to 5."""

MOST_FLIPS = 8.0
"""Gates that turn, as a multiple of the share that is expected to. Measured in the legal variations of benchmarks/zoo:
at most 0.4, where more than 4 turned."""

FEW_FLIPS = 2.0
"""Gates that may turn in any case: pooling chooses among equal elements, and small numbers scatter."""

REPEATED = 1.5
"""Roundings of a parameter's gradient, as a multiple of those of one operation: a recurrent cell sums it position by
position in its compute dtype. Measured with torch's GRU on the CPU: 2 roundings in bfloat16, over 12 positions."""

ADAPTIVE_GAIN = 30.0
"""The gain in the square root law of adaptive optimizers; see `Floors.update`."""


@dataclass(slots=True)
class Floors:
    """Floors of one step, fed with the differences measured so far in it.

    Attributes:
        parameters: Relative difference of all parameters together, as the step found them.
        own: The same per module, of the parameters that it owns.
        biases: L2 norm of the difference of a module's bias over the square root of its elements, by the module's path.
        gradients: Largest relative difference of each parameter's gradients so far in the run.
        states: Largest relative difference of each parameter's optimizer state, in this step.
        precision: Largest rounding of a dtype observed on the data's path.
        flow: Largest relative difference on the data's path.
        settings_differ: Whether the optimizers are set differently, so that states and updates must differ.
        coefficients: Relative error of an optimizer's own coefficients, such as 1 - beta.
    """

    parameters: float = 0.0
    own: dict[str, float] = field(default_factory=dict)
    biases: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)
    precision: float = 0.0
    flow: float = 0.0
    settings_differ: bool = False
    coefficients: float = 0.0

    def activation(self, path: str, dtypes: Iterable[str]) -> float:
        """Floor of an output of a module, or of the gradient of an output."""
        self.precision = max(self.precision, *(rounding(dtype) for dtype in dtypes))
        # What it computes from and what it computes with differ independently; its own rounding adds to that.
        parameters = max(self.parameters, self.owned(path))
        product = self.flow * parameters if self.flow and parameters else 0.0  # which counts if both are large
        inputs = max(math.hypot(self.flow, parameters), product)
        return self.precision + self._gain(LATER_GAIN) * inputs

    def owned(self, path: str) -> float:
        """Relative difference of the parameters that a module owns.

        One that owns none may be called with what the module around it has computed with its own: the activation or
        the dropout inside a norm, or behind an embedding of positions.
        """
        own = self.own.get(path)
        return self.own.get(path.rpartition(".")[0], 0.0) if own is None and path else own or 0.0

    def _gain(self, later: float) -> float:
        return later if self.parameters and self.precision <= rounding("float32") else GAIN

    def turned_rows(self, rows: int, *, computed: bool = False) -> float:
        """Number of rows of a choice that may change because of differences at its inputs.

        A choice is a gate (see `gated`): about a share e of its decisions lies within e of the threshold.

        Args:
            rows: Number of rows in the baseline.
            computed: What is compared with the threshold is computed inside a module, and rounded there.
        """
        hidden = rows * max(self.flow, self.parameters, self.precision if computed else 0.0)
        return max(1.0, GAIN * hidden) if hidden >= SEEN_FLIPS else 0.0

    def gated(self, baseline: Any, candidate: Any, turned: int | None = None) -> float:
        """Floor of a gradient that came back through gates: ReLU, max pooling, a router.

        A gate whose input lies within its own error of the threshold may be open in one run and shut in the other. Then
        the whole element differs: relative to the tensor, sqrt(k / n) for k of n elements. Shut gates leave exact
        zeros. k is the change in their number, plus the gates that opened and shut without changing it: of elements of
        unit size about a share e lies within e of a threshold. Less than `SEEN_FLIPS` of an element is left out, unless
        the difference lies in two elements alone.

        If many more gates are shut in one run than differences of the size e can turn, it is no noise: a wrong mask,
        or a gradient that is lost behind the gates. So k is at most `MOST_FLIPS` times the share that is expected.

        Args:
            baseline: The baseline's summary.
            candidate: The candidate's summary.
            turned: Number of gates that turned, if they leave no zeros when they shut, as those of LeakyReLU; each then
                changes an element by less than its size. None for gates that leave zeros.
        """
        zeros, count = (int(baseline["zero"]), int(candidate["zero"])), int(baseline["count"])
        power = float(baseline["sum_of_squares"])
        if not power or math.isinf(self.flow) or ((not all(zeros) or zeros[0] == count) and turned is None):
            return 0.0
        hidden = count * max(self.flow, self.parameters)
        expected = count * max(self.flow, self.parameters, self.precision / 32.0)
        changed = min(abs(zeros[0] - zeros[1]) if turned is None else turned, FEW_FLIPS + MOST_FLIPS * expected)
        flips = changed + (UNEVEN * hidden if hidden >= SEEN_FLIPS else 0.0)
        if not flips and hidden >= _RARE_FLIPS and self._is_of_two_elements(baseline, candidate):
            flips = 2.0
        # Their mean square, and the deviation from it if there are few.
        mean, most = power / (count - zeros[0]), float(largest(baseline)) ** 2
        return math.sqrt((flips * mean + math.sqrt(flips) * most) / power)

    def _is_of_two_elements(self, baseline: Any, candidate: Any) -> bool:
        """True if a difference is one of rounding but for two elements: each is in one bucket of the sketch."""
        squares = np.sort(np.square(candidate["sketch"] - baseline["sketch"]))
        within = self.precision + GAIN * max(self.flow, self.parameters)
        return float(squares[:-2].sum()) <= within**2 * float(baseline["sum_of_squares"])

    def gradient(self, cancellation: float, *, dtype: str = "", terms: float = 1.0, accumulated: int = 0) -> float:
        """Floor of a parameter's gradient.

        Args:
            cancellation: Norm of the summed terms over the norm of their sum. It is large for a gradient that is
                mathematically zero, e.g. of a key bias: only rounding is left of it, as large as the rounding of its
                terms.
            dtype: Dtype of the gradient, or a shorter one in which its terms are summed (a norm under autocast).
            terms: Number of terms summed element by element, as for biases and norms. Their sum is good to sqrt(terms)
                u, and not every kernel sums in a longer dtype. Measured with torch on the CPU, for 128 to 500,000
                terms: 0.25 sqrt(terms) u in bfloat16 (LayerNorm), and in float32 up to 0.4 sqrt(terms) u of the terms'
                norm (a bias before BatchNorm).
            accumulated: Micro-batches whose gradients were summed in `dtype`, one after the other.
        """
        u = UNIT_ROUNDOFF.get(dtype, 0.0)
        precision = max(self.precision, rounding(dtype))  # its own, if activations were not recorded
        own, several = math.sqrt(terms) * u, REPEATED * precision + accumulated * u
        inputs = max(self.flow, self.parameters)
        handed_on = math.hypot(own, self._gain(_LATER_SUMS) * inputs * max(1.0, inputs))  # independent errors
        return max(several, handed_on) * max(1.0, cancellation)

    def state(self, path: str, dtypes: Iterable[str]) -> float:
        """Floor of an optimizer's state of a parameter, which is linear (or quadratic) in its gradients."""
        if self.settings_differ:
            return math.inf
        local = max((rounding(dtype) for dtype in dtypes), default=0.0)
        gradient = self.gradients.get(path, 0.0)
        squared = gradient * (2.0 + gradient)  # (1 + e)^2 - 1
        return max(local, self.precision, self.coefficients, GAIN * gradient, squared)

    def update(self, path: str, dtype: str, *, adaptive: bool, storage: float, unseen: float = 0.0) -> float:
        """Floor of a parameter's update.

        The first update of an adaptive optimizer is the *sign* of the gradient: every element smaller than its own
        error goes either way. A relative error e flips a share of about e of the elements, which is a relative
        difference of order sqrt(e). Rounding in the optimizer's state is an error of each element and flips nothing.

        Args:
            path: The parameter.
            dtype: Its dtype.
            adaptive: Whether the optimizer divides by a moment of the gradient.
            storage: Norm of the parameter over norm of its update: an update is stored only to the rounding of the
                parameter that it is added to.
            unseen: Floor of its gradient, if that was not observed.
        """
        if self.settings_differ:
            return math.inf
        gradient, state = self.gradients.get(path, 0.0), max(self.states.get(path, 0.0), rounding(dtype))
        own = ADAPTIVE_GAIN * math.sqrt(max(gradient, unseen)) if adaptive else max(GAIN * gradient, unseen)
        return max(own, GAIN * state, 2.0 * UNIT_ROUNDOFF.get(dtype, 0.0) * (1.0 + storage))

    def factor(self, path: str, dtypes: Iterable[str], *, left_over: float, storage: float) -> float:
        """Floor of a difference that is only a constant factor.

        If a floor is higher than its inputs explain, it stands for noise without a direction: canceled sums, gates,
        signs of small gradients. Such noise does not multiply a tensor by a constant. It leaves a residual beside the
        best-fitting multiple of the baseline, and that residual measures it.

        Args:
            path: The module or parameter.
            dtypes: Dtypes of both sides.
            left_over: Norm of that residual over the candidate's norm, or what else differs at its inputs.
            storage: For an update: norm of the parameter over norm of its update.
        """
        units = [UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes]
        incoming = max(left_over, self.gradients.get(path, 0.0))
        return max(
            self.least_factor,
            self.coefficients,
            *map(rounding, dtypes),
            GAIN * incoming,
            2.0 * max(units) * (1.0 + storage),
        )

    @property
    def least_factor(self) -> float:
        """A number that `factor` is never below."""
        return max(self.precision, GAIN * self.flow, GAIN * self.parameters)

    def scalar(self, terms: int) -> float:
        """Floor of a number that was reduced from many: `sqrt(N) * u`, or the gain of the input differences."""
        reduction = math.sqrt(max(1, terms)) * UNIT_ROUNDOFF["float32"]
        inputs = max(self.flow, self.parameters)
        return max(self.precision, reduction, GAIN * inputs * max(1.0, inputs))

    def saw(self, difference: float) -> None:
        """Note a relative difference on the data's path."""
        if math.isfinite(difference):
            self.flow = max(self.flow, difference)
        else:
            self.flow = math.inf

    def saw_state(self, path: str, difference: float) -> None:
        """Note a relative difference of a parameter's optimizer state."""
        self.states[path] = max(self.states.get(path, 0.0), difference)

    def saw_gradient(self, path: str, difference: float) -> None:
        """Note a relative difference of a parameter's gradient."""
        self.gradients[path] = max(self.gradients.get(path, 0.0), difference)

    def enter(self, pair: Pair, difference: float, *, flows: bool) -> None:
        """Note a measured relative difference for the floors of later sites; `flows` if it is on the data's path."""
        key = pair.baseline.key
        if key.phase == "optimizer":
            self.saw_state(key.path, difference)
        elif key.phase == "grad" and key.slot == "grad":
            self.saw_gradient(key.path, difference)
        if flows:
            self.saw(difference)
