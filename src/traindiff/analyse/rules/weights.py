"""Sizes of the gradients and of the updates of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from statistics import median
from typing import ClassVar

from traindiff.analyse.merge.indexed import once, sites
from traindiff.analyse.merge.recorded_calls import clips
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.optimizers import (
    largest_rate,
    learning_rates,
    moves_parameters,
)
from traindiff.analyse.rules.rule import Found, Limit, Repeated, RepeatedRule
from traindiff.core.summary import UNIT_ROUNDOFF, is_finite, norm_of

FEW = 16
"""Elements below which a tensor is not the weight of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradient:
    """The gradient of a weight: of a parameter with two axes or more.

    Attributes:
        entry: Of the gradient.
        size: Root mean square of its elements; more than 0.
        place: Place of its module's output in the forward pass; -1 if it was not observed.
    """

    entry: MergedSite
    size: float
    place: int

    @property
    def path(self) -> str:
        """Path of the weight."""
        return self.entry.key.path


@once
def weight_gradients(table: StepTable) -> Sequence[WeightGradient]:
    """Gradients of weights that are finite and not 0, in the order of the forward pass.

    Biases and norms are left out: those before a normalization have gradients that are 0 but for rounding.
    """
    places = {key.path: entry.order for key, entry in sites(table, "forward", stage="")}
    found = []
    for key, entry in sites(table, "grad", stage=""):
        if entry.unobserved or len(entry.shape) < 2:
            continue
        count, size = int(entry.summary["count"]), norm_of(entry.summary)
        if count < FEW or not size or not is_finite(entry.summary):
            continue
        place = places.get(key.path.rpartition(".")[0], -1)
        found.append(WeightGradient(entry=entry, size=size / math.sqrt(count), place=place))
    return sorted(found, key=lambda one: one.place)


class GradientsReachEveryLayer(RepeatedRule):
    """Weights have gradients many orders of magnitude smaller than the layer with the largest gradients.

    The rule compares the root mean squares of the gradients' elements. In the trainings on which the limit was tried
    (GPT, MLP, convolutions with batch normalization), the smallest is 0.005 of the largest. Some models scale the
    output of a layer by 1e-6 at the beginning, on purpose. The gradients of such a layer begin at a millionth of the
    largest, and the limit is a thousandth of that. Behind twelve sigmoids, the share is 7e-11 (Hochreiter, 1991; Glorot
    and Bengio, 2010). Another rule (`no-gradient`) finds gradients that are exactly 0, such as those behind a head of
    zeros in the first step.
    """

    name = "vanishing-gradients"
    finds = "The gradient of a layer is many orders of magnitude smaller than that of the layer that gets most."
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e-9, message="smallest part of the largest layer's gradient"),
        "least_steps": Limit(
            default=10, message="steps in a row in which it must be so; heads of zeros wake up sooner"
        ),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        gradients = weight_gradients(table) if moves_parameters(table) else []
        if not gradients:
            return None
        most = max(gradients, key=lambda one: one.size)
        limit = self.limit("ratio") * most.size
        return {
            one.path: (one.entry, {"size": one.size, "largest": most.size, "largest_at": most.path})
            for one in gradients
            if one.size < limit
        }

    def _message(self, row: Repeated) -> str:
        size, most = row.numbers["size"], row.numbers["largest"]
        return (
            f"The gradient of {row.key} vanishes: its elements are {size:.2g} (root mean square), and those of "
            f"{row.numbers['largest_at']} {most:.2g}, {most / size:.2g} x as much, in {row.num_steps} steps. Look for "
            "saturated units and for too small an initialization between the two; residual connections and "
            "normalization help."
        )


class GradientsStayBounded(RepeatedRule):
    """Weights have gradients many orders of magnitude larger than the layer nearest the loss.

    The rule compares the root mean squares of the gradients' elements. The nearest layer is the one whose module
    returns last in the forward pass. In the trainings on which the limit was tried, no layer has more than 80 x the
    last one's. In recurrent layers whose matrices enlarge their inputs, the gradient grows with every position (Pascanu
    et al., 2013). A last layer may have a tiny gradient because its loss counts little, so the other gradient must also
    be large by itself: several times as large as the weight, before clipping.
    """

    name = "exploding-gradients"
    finds = "The gradient of a layer is many orders of magnitude larger than that of the layer nearest the loss."
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e5, message="largest multiple of the last layer's gradient"),
        "size": Limit(default=10.0, message="norm of the gradient before clipping, as a multiple of the weight's norm"),
        "least_steps": Limit(default=3, message="steps in a row in which it must be so; a run does not survive many"),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        gradients = weight_gradients(table) if moves_parameters(table) else []
        if not gradients or gradients[-1].place < 0:
            return None
        last = gradients[-1]
        limit = self.limit("ratio") * last.size
        return {
            one.path: (one.entry, {"size": one.size, "last": last.size, "last_at": last.path})
            for one in gradients
            if one.size > limit and _relative(table, one) > self.limit("size")
        }

    def _message(self, row: Repeated) -> str:
        size, last = row.numbers["size"], row.numbers["last"]
        return (
            f"The gradient of {row.key} explodes: its elements are {size:.2g} (root mean square), {size / last:.2g} x "
            f"those of {row.numbers['last_at']}, the layer nearest the loss, in {row.num_steps} steps. Use a smaller "
            "initialization or normalization between the two, or shorter sequences; clipping hides it. A loss without "
            "a lower bound, such as one with a term of the wrong sign, does the same."
        )


def _relative(table: StepTable, gradient: WeightGradient) -> float:
    """Norm of a gradient before clipping, as a multiple of the weight's norm; 0 if unknown."""
    parameter = table.get(SiteKey("param", "", gradient.path, "value"))
    if parameter is None or parameter.unobserved:
        return 0.0
    clipped = prod(clip.coefficient for clip in clips(table))
    size = clipped * norm_of(parameter.summary)
    return norm_of(gradient.entry.summary) / size if size else inf


@once
def weight_updates(table: StepTable) -> Sequence[tuple[MergedSite, float]]:
    """The update of each weight, and its norm as a share of the weight's norm after it.

    Weights have two axes or more: the first updates may rightly replace a bias or a norm.
    """
    found = []
    for key, update in sites(table, "update", stage=""):
        if len(update.shape) < 2 or int(update.summary["count"]) < FEW:
            continue
        parameter = table.get(SiteKey("param", "", key.path, "value"))
        if parameter is None or parameter.unobserved or not is_finite(parameter.summary):
            continue
        size = norm_of(parameter.summary)
        if size and is_finite(update.summary):
            found.append((update, norm_of(update.summary) / size))
    return found


class UpdatesAreLargeEnough(RepeatedRule):
    """Half of all weights move by less than a ten-millionth of their size, step after step.

    Then it would take ten million steps in one direction to replace the weights; a thousand is usual. The rule also
    counts a weight that has a gradient and a learning rate and does not move at all, because rounding removes its
    updates: in a short dtype, or if the learning rate itself is below that limit. Updates may be this small for a while
    at the beginning of a warm-up and at the end of a decay, so the rule only warns.
    """

    name = "small-updates"
    finds = "Steps move half of all weights by next to nothing."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e-7, message="smallest norm of an update, as a share of the weight's norm"),
        "least_steps": Limit(default=20, message="steps in a row in which it must be so; warm-ups begin small"),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        moved = list(self._moved(table)) if moves_parameters(table) else []
        if not moved:
            return None
        middle = median(ratio for _, ratio in moved)
        first = next(entry for entry, ratio in moved if ratio <= middle)
        return {"": (first, {"ratio": middle})} if middle < self.limit("ratio") else {}

    def _moved(self, table: StepTable) -> Iterator[tuple[MergedSite, float]]:
        """Weights that the step moved, and weights whose updates rounding removes, in spite of a gradient."""
        rates = learning_rates(table)
        for entry, ratio in weight_updates(table):
            path = entry.key.path
            gradient = table.get(SiteKey("grad", "", path, "grad"))
            rests = gradient is None or gradient.unobserved or not norm_of(gradient.summary)
            rate = largest_rate(path, rates, self.facts)
            short = UNIT_ROUNDOFF.get(entry.dtype, 0.0) >= UNIT_ROUNDOFF["float16"]
            if ratio or (rate and (short or rate < self.limit("ratio")) and not rests):
                yield entry, ratio

    def _message(self, row: Repeated) -> str:
        ratio = row.numbers["ratio"]
        how = f"by less than {ratio:.2g} of their size" if ratio else "not at all, although they have gradients"
        lost = "" if ratio else f"; {row.site.dtype} rounds their updates away"
        return (
            f"Steps move half of all weights {how}, in {row.num_steps} steps in a row: usual is about 0.001. Look at "
            f"the learning rate, and whether gradients are divided once too often{lost}."
        )


class UpdatesAreSmall(RepeatedRule):
    """Steps move weights by a large part of their own norm, again and again.

    An update of about 1e-3 of the weight's norm is usual. In the healthy trainings on which the limit was tried, the
    largest update after the tenth step is 0.1, and 0.5 with sigmoids and a learning rate of 0.5. If a weight begins at
    0, its first update is all of the weight, its second a half, and so on. If the updates point in random directions,
    the tenth is still 0.32 of the weight. So if a weight moves by half of its size ten times in a row, it has lost what
    it had learned.
    """

    name = "large-updates"
    finds = "Steps move a weight by a large part of its size, again and again."
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=0.5, message="largest norm of an update, as a share of the weight's norm after it"),
        "least_steps": Limit(
            default=10, message="steps in a row in which it must be so; the first ones may be that large"
        ),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        if not moves_parameters(table):
            return None
        limit = self.limit("ratio")
        return {entry.key.path: (entry, {"ratio": ratio}) for entry, ratio in weight_updates(table) if ratio > limit}

    def _message(self, row: Repeated) -> str:
        return (
            f"Updates of {row.key} are as large as itself: {row.numbers['ratio']:.2g} x its norm, and more than "
            f"{self.limit('ratio'):g} x in {row.num_steps} steps in a row. Usual is about 0.001: lower the learning "
            "rate."
        )
