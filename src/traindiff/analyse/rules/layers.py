"""Layers that pass no gradient or draw at random when they should not: dropout, saturated and dead units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule, Rule
from traindiff.core.shards import BUCKETS, OPEN, Shard
from traindiff.core.summary import nonfinite_count

EVALUATION = "evaluation"
"""Stage of a forward pass without gradients; `record(evaluation=True)` records them."""

FEWEST_ELEMENTS = 256
"""Elements below which shares of zeros say little."""


class EvaluationIsCertain(Rule):
    """Dropout modules drop as large a share of their input in evaluation as in training.

    Active dropout sets that share to 0; inactive dropout returns its input. So dropout is active under three
    conditions. The share of zeros is the same as in training, within 6 deviations of chance. The returned tensor has
    both signs (behind a ReLU or a softmax, zeros are usual). And no earlier module returned the same tensor. The rule
    needs `record(evaluation=True)`; without it, evaluation is not recorded. Some people use active dropout on purpose
    to draw samples (Gal and Ghahramani, 2016), so the rule only warns.
    """

    name = "dropout-in-evaluation"
    finds = "Dropout is active in forward passes without gradients."
    needs = "a model with dropout, and evaluations, which record(evaluation=True) records"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_share": Limit(default=0.01, message="smallest share of zeros that is put down to dropout"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return EVALUATION in contents.stages and any(
            one.startswith("Dropout") for one in contents.facts.modules.values()
        )

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._in_training: dict[str, float] = {}

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        before: dict[str, set[int]] = {}
        found = []
        for key, entry in sites(table, "forward"):
            if key.stage not in ("", EVALUATION) or entry.unobserved:
                continue
            fingerprint = int(entry.summary["fingerprint"])
            earlier = before.setdefault(key.stage, set())
            if self.facts.modules.get(key.path, "").startswith("Dropout"):
                changed = fingerprint not in earlier
                if not key.stage and changed and _has_both_signs(entry):
                    self._in_training[key.path] = _share(entry)
                elif key.stage and changed and _has_both_signs(entry):
                    found.append(entry)
            earlier.add(fingerprint)
        for entry in found:
            share, usual = _share(entry), self._in_training.get(entry.key.path)
            if usual is None or not self.limit("least_share") <= share <= 1.0 - self.limit("least_share"):
                continue
            chance = math.sqrt(usual * (1.0 - usual) / int(entry.summary["count"]))
            if abs(share - usual) > 6.0 * math.sqrt(2.0) * chance:
                continue
            message = (
                f"{entry.key.path} is active in a forward pass without gradients: {share:.1%} of what it returns is 0, "
                f"as in training ({usual:.1%}). Call model.eval() before evaluating, and model.train() after it."
            )
            yield self.finding(entry, message, step=step, share=share, share_in_training=usual)


def _share(entry: MergedSite) -> float:
    return int(entry.summary["zero"]) / int(entry.summary["count"])


def _has_both_signs(entry: MergedSite) -> bool:
    """True if there are enough numbers below and above 0 for zeros to stand out."""
    count, negative, zero = (int(entry.summary[name]) for name in ("count", "negative", "zero"))
    present = count - zero
    return count >= FEWEST_ELEMENTS and present > 0 and 0.05 < negative / present < 0.95


SQUASHING = frozenset({"Tanh", "Sigmoid"})
"""Modules whose derivative follows from their output."""

FEW = 16
"""Outputs below which a mean says little."""


class UnitsAreSensitive(RepeatedRule):
    """The mean derivative of `Tanh` and `Sigmoid` modules is almost 0, step after step.

    The derivative follows from the output, and its mean from the output's sum and sum of squares: 1 - y^2 and y (1 -
    y). At 1 % of the largest derivative, outputs of a Tanh are 0.995 on average. The rule ignores the model's own
    output, because a correct classifier is saturated. Gates inside a model may rightly be saturated, so the rule only
    warns. It does not see `torch.tanh` and `torch.sigmoid`, gates inside an LSTM, and other activations.
    """

    name = "saturated-units"
    finds = "A layer of Tanh or Sigmoid is saturated: next to no gradient passes."
    needs = "Tanh or Sigmoid modules"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "sensitivity": Limit(default=0.01, message="smallest mean derivative, as a share of the largest there can be"),
        "least_steps": Limit(default=10, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return not SQUASHING.isdisjoint(contents.facts.modules.values())

    def _wrong(self, table: StepTable) -> Found:
        returned = {int(one.summary["fingerprint"]) for key, one in sites(table, "forward", stage="") if not key.path}
        found: Found = {}
        for key, entry in sites(table, "forward", stage=""):
            kind = self.facts.modules.get(key.path)
            if not key.path or kind not in SQUASHING or entry.unobserved:
                continue
            count = int(entry.summary["count"])
            if count < FEW or nonfinite_count(entry.summary) or int(entry.summary["fingerprint"]) in returned:
                continue
            mean, squares = float(entry.summary["sum"]) / count, float(entry.summary["sum_of_squares"]) / count
            sensitivity = 1.0 - squares if kind == "Tanh" else 4.0 * (mean - squares)
            if sensitivity < self.limit("sensitivity"):
                found[key] = (entry, {"sensitivity": max(0.0, sensitivity)})
        return found

    def _message(self, row: Repeated) -> str:
        path = row.site.key.path
        return (
            f"{path} ({self.facts.modules[path]}) is saturated: its mean derivative is "
            f"{row.numbers['sensitivity']:.2g} of the largest there can be, in {row.num_steps} steps in a row. Look at "
            "how large its inputs are: initialization, learning rate, or a normalization before it."
        )


RECTIFIERS = frozenset({"ReLU", "ReLU6"})
"""Modules that return exactly 0 for all negative inputs, and pass no gradient there."""


@dataclass(slots=True, kw_only=True)
class _Layer:
    """Observations of a layer's units, by bucket of its profile.

    Attributes:
        entry: Its output.
        units: Units in each bucket.
        steps: Steps in a row in which a bucket was all 0.
    """

    entry: MergedSite
    units: NDArray[np.int64]
    steps: NDArray[np.int64]


class UnitsLive(Rule):
    """Most units of a layer behind a `ReLU` module return 0 for every sample, in every one of the last steps.

    A unit that is below 0 for all inputs gets no gradient, so it stays there (Lu et al., Dying ReLU, 2019). The
    recording keeps the largest magnitudes of up to 16 groups of units (profiles, FORMAT.md). A group is a sixteenth of
    the channels of a convolution, and 16 units or a sixteenth of a linear layer. A group counts as dead only if all of
    its units are dead. So the rule misses single dead units (a healthy layer has some), and never counts a live one.
    The rule does not see a ReLU that is called as a function, because it is not a module. It does not judge GELU, SiLU
    and others, because they return numbers near 0, not 0. If a whole layer of those is dead, the weights before it get
    no gradient, and the rule `no-gradient` finds it.
    """

    name = "dead-units"
    finds = "Most units behind a ReLU return 0 for every sample."
    needs = "ReLU modules"
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="largest share of a layer's units that may be dead"),
        "least_steps": Limit(default=10, message="steps at the end of the run in which they return nothing but 0"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return not RECTIFIERS.isdisjoint(contents.facts.modules.values())

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._layers: dict[SiteKey, _Layer] = {}
        self._last_step = 0

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        self._last_step = step
        for key, entry in sites(table, "forward", stage=""):
            if self.facts.modules.get(key.path) not in RECTIFIERS:
                continue
            if entry.unobserved or not entry.batched or len(entry.shape) < 2:
                continue
            layer = self._layers.get(key)
            if layer is None:
                zeros = np.zeros(BUCKETS, dtype=np.int64)
                layer = self._layers[key] = _Layer(entry=entry.without_parts(), units=_units(entry.shape), steps=zeros)
            # The largest magnitudes leave out NaN and infinities, which are not 0.
            is_zero = (_largest(entry) == 0.0) & (nonfinite_count(entry.summary) == 0)
            layer.steps = np.where(is_zero, layer.steps + 1, 0)

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        for layer in self._layers.values():
            dead = int(layer.units[layer.steps >= self.limit("least_steps")].sum())
            units = int(layer.units.sum())
            if not dead or dead <= self.limit("share") * units:
                continue
            path = layer.entry.key.path
            num_steps = int(layer.steps[layer.steps >= self.limit("least_steps")].min())
            message = (
                f"At least {dead} of {units} units of {path} are dead: they return 0 for every sample in the last "
                f"{num_steps} steps, and get no gradient. Lower the learning rate, look at biases far below 0, or use "
                "LeakyReLU, GELU or normalization."
            )
            first = max(0, self._last_step - num_steps + 1)
            yield self.finding(layer.entry, message, step=first, dead=dead, units=units, num_steps=num_steps)


def _by_rows(shape: tuple[int, ...]) -> bool:
    """True if the units are on axis 1 (channels of an image), and not on the last one (features)."""
    return len(shape) > 3


def _units(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Units in each bucket of the profile."""
    grid = Shard(shape=shape, global_shape=(OPEN, *shape[1:]), offset=(0,) * len(shape)).grid
    numbers: NDArray[Any]
    if _by_rows(shape):
        numbers = np.arange(shape[1]) // grid.row_block % BUCKETS
    else:
        numbers = np.arange(grid.columns) // grid.column_block
    return np.bincount(numbers, minlength=BUCKETS)


def _largest(entry: MergedSite) -> NDArray[np.float64]:
    return np.asarray(entry.summary["row_largest" if _by_rows(entry.shape) else "column_largest"])
