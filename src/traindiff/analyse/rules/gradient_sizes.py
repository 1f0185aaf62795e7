"""The gradients of a step's weights, and how large their elements are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.recorded_calls import clips
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.rules.learning_rates import moves_parameters
from traindiff.analyse.rules.rule import InARow, Limit, Rule
from traindiff.core.summary import nonfinite_count, norm

FEW = 16
"""Elements below which a tensor is no weight of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradient:
    """The gradient of a weight: of a parameter with two axes or more.

    Attributes:
        entry: Of the gradient.
        size: Root mean square of its elements; more than 0.
        place: When in the forward pass its module returned; -1 where it was not observed.
    """

    entry: Entry
    size: float
    place: int

    @property
    def path(self) -> str:
        """Path of the weight."""
        return self.entry.key.path


def weight_gradients(table: Mapping[Key, Entry]) -> list[WeightGradient]:
    """Gradients of weights that are finite and not 0, in the order of the forward pass.

    Biases and norms are left out: those before a normalization have gradients that are 0 but for rounding.
    """
    places = {key.path: entry.order for key, entry in table.items() if key.phase == "forward" and not key.stage}
    found = []
    for key, entry in table.items():
        if key[:2] != ("grad", "") or entry.unobserved or len(entry.shape) < 2:
            continue
        count, size = int(entry.summary["count"]), float(norm(entry.summary))
        if count < FEW or not size or nonfinite_count(entry.summary):
            continue
        place = places.get(key.path.rpartition(".")[0], -1)
        found.append(WeightGradient(entry=entry, size=size / math.sqrt(count), place=place))
    return sorted(found, key=lambda one: one.place)


class GradientsReachEveryLayer(Rule):
    """Weights whose gradients are many orders of magnitude smaller than those of the layer that gets most.

    What is compared is the root mean square of a gradient's elements. In the trainings on which the limit was tried
    (GPT, MLP, convolutions with batch normalization) the smallest is 0.005 of the largest; layers whose output is
    scaled by 1e-6 at first, as some are on purpose, begin with a millionth, and the limit is a thousandth of that.
    Behind twelve sigmoids it is 7e-11 (Hochreiter, 1991; Glorot and Bengio, 2010). Gradients that are exactly 0, as
    those behind a head of zeros are in the first step, are another rule's (`no-gradient`).
    """

    name = "vanishing-gradients"
    finds = "The gradient of a layer is many orders of magnitude smaller than that of the layer that gets most."
    kinds = ("vanishing-gradients",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e-9, message="smallest part of the largest layer's gradient"),
        "least_steps": Limit(
            default=10, message="steps in a row in which it must be so; heads of zeros wake up sooner"
        ),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float, WeightGradient]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        gradients = weight_gradients(table) if moves_parameters(table) else []
        if gradients:
            most = max(gradients, key=lambda one: one.size)
            limit = self.limit("ratio") * most.size
            found = {one.path: (one.entry.without_parts(), one.size, most) for one in gradients if one.size < limit}
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for path, (entry, size, most), first, num_steps in self._in_a_row:
            message = (
                f"The gradient of {path} vanishes: its elements are {size:.2g} (root mean square), and those of "
                f"{most.path} {most.size:.2g}, {most.size / size:.2g} x as much, in {num_steps} steps. Look for "
                "saturated units and for too small an initialization between the two; residual connections and "
                "normalization help."
            )
            evidence = {"size": size, "largest": most.size, "largest_at": most.path, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="vanishing-gradients", message=message, evidence=evidence)


class GradientsStayBounded(Rule):
    """Weights whose gradients are many orders of magnitude larger than those of the layer nearest the loss.

    What is compared is the root mean square of a gradient's elements; the nearest layer is the one whose module returns
    last in the forward pass. In the trainings on which the limit was tried no layer has more than 80 x the last one's;
    recurrent layers whose matrices enlarge what they are given have it grow with every position (Pascanu et al., 2013).
    A last layer may have next to no gradient because its loss counts little, so the gradient of the other must also be
    large by itself: several times as large as the weight, before clipping.
    """

    name = "exploding-gradients"
    finds = "The gradient of a layer is many orders of magnitude larger than that of the layer nearest the loss."
    kinds = ("exploding-gradients",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e5, message="largest multiple of the last layer's gradient"),
        "size": Limit(default=10.0, message="norm of the gradient before clipping, as a multiple of the weight's norm"),
        "least_steps": Limit(default=3, message="steps in a row in which it must be so; a run does not survive many"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float, WeightGradient]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        gradients = weight_gradients(table) if moves_parameters(table) else []
        if gradients and gradients[-1].place >= 0:
            last = gradients[-1]
            limit = self.limit("ratio") * last.size
            found = {
                one.path: (one.entry.without_parts(), one.size, last)
                for one in gradients
                if one.size > limit and _relative(table, one) > self.limit("size")
            }
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for path, (entry, size, last), first, num_steps in self._in_a_row:
            message = (
                f"The gradient of {path} explodes: its elements are {size:.2g} (root mean square), "
                f"{size / last.size:.2g} x those of {last.path}, the layer nearest the loss, in {num_steps} steps. Use "
                "a smaller initialization or normalization between the two, or shorter sequences; clipping hides it."
            )
            evidence = {"size": size, "last": last.size, "last_at": last.path, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="exploding-gradients", message=message, evidence=evidence)


def _relative(table: Mapping[Key, Entry], gradient: WeightGradient) -> float:
    """Norm of a gradient before it was clipped, as a multiple of the weight's norm; 0 where that is not known."""
    parameter = table.get(Key("param", "", gradient.path, "value", 0, 0))
    if parameter is None or parameter.unobserved:
        return 0.0
    clipped = prod(clip.coefficient for clip in clips(table))
    size = clipped * float(norm(parameter.summary))
    return float(norm(gradient.entry.summary)) / size if size else inf
