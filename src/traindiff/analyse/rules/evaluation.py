"""Evaluations that are not what they should be: they draw random numbers, or divide by an estimate that is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.layers import EVALUATION
from traindiff.analyse.rules.rule import Contents, Rule
from traindiff.core.observation import DRAWS, ESTIMATE
from traindiff.core.site import ROOT
from traindiff.core.summary import number

_RATE = re.compile(r"(?i)(?!.*(layer|path)).*drop.*")
"""Names of settings that are rates of dropout. Some models draw for LayerDrop in every mode, and use it in training."""


class EvaluationDrawsNothing(Rule):
    """A module with a dropout rate draws random numbers in an evaluation, although it is in evaluation mode.

    `nn.Dropout` looks at its mode. Functions do not: `F.dropout` and `scaled_dot_product_attention` drop out at the
    rate that they are given. The rule names the innermost module that draws, if it has an attribute that is a rate
    between 0 and 1 and has "drop" in its name (but not "layer" or "path"). Models that sample on purpose draw, too
    (variational autoencoders, diffusion), and so does Monte Carlo dropout (Gal and Ghahramani, 2016): the rule only
    warns, and gives a note about modules without such a rate, and about a batch that was evaluated twice with the same
    parameters and other results. It needs `record(evaluation=True)`.
    """

    name = "random-evaluation"
    finds = "A module in evaluation mode draws random numbers, and has a dropout rate."
    needs = "evaluations, which record(evaluation=True) records"
    warns = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return EVALUATION in contents.stages

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._told: set[str] = set()
        self._others: dict[str, int] = {}
        self._differ: int | None = None

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step; each module is named once."""
        if self._differ is None and _evaluated_twice(table):
            self._differ = step
        for key, entry in sites(table, stage=DRAWS):
            if entry.unobserved or key.path in self._told:
                continue
            self._told.add(key.path)
            rate = _dropout_rate(self.facts.settings.get(key.path, {}))
            if rate is None:
                self._others[key.path] = step
                continue
            setting, value = rate
            message = (
                f"{key.path or ROOT} draws random numbers in an evaluation, although it is in evaluation mode, and it "
                f"has {setting} = {value}: does it drop out in a function that does not look at the mode? Give it "
                "training=self.training, or a rate of 0 if not self.training."
            )
            yield self.finding(entry, message, step=step, setting=setting, rate=float(value))

    def notes(self) -> Iterator[str]:
        """Notes on draws that may well be meant."""
        if self._others:
            path, step = next(iter(self._others.items()))
            more = f" and {len(self._others) - 1} more modules draw" if len(self._others) > 1 else " draws"
            yield (
                f"{path or ROOT}{more} random numbers in evaluation mode (first in step {step}). Models that sample do "
                "so."
            )
        if self._differ is not None:
            yield (
                f"An evaluation in step {self._differ} gives another result for the same batch and parameters than an "
                "earlier one."
            )


def _dropout_rate(settings: Mapping[str, str]) -> tuple[str, str] | None:
    """Name and value of a setting that is a rate of dropout, between 0 and 1."""
    for name, value in settings.items():
        if _RATE.fullmatch(name):
            try:
                rate = float(value)
            except ValueError:
                continue
            if 0.0 < rate < 1.0:
                return name, value
    return None


_Known = tuple[str, tuple[int, ...], int]  # slot, shape and fingerprint


def _evaluated_twice(table: StepTable) -> bool:
    """True if two evaluations in one step have the same inputs and other outputs of the model.

    A tensor is known by its shape and its fingerprint, to which zeros add nothing: a text that grows by the token 0
    keeps its fingerprint.
    """
    inputs: dict[int, list[_Known]] = {}
    outputs: dict[int, list[_Known]] = {}
    for key, entry in sites(table, stage=EVALUATION):
        if key.path or entry.unobserved:
            continue
        kept = inputs if key.phase == "batch" else outputs if key.phase == "forward" else None
        if kept is not None:
            bits = [(key.slot, entry.shape, int(part.summary["fingerprint"])) for part in entry.parts]
            kept.setdefault(key.call, []).extend(bits)
    seen: dict[tuple[_Known, ...], list[_Known]] = {}
    for call, given in inputs.items():
        returned = outputs.get(call)
        if returned and seen.setdefault(tuple(given), returned) != returned:
            return True
    return False


class SpectralNormsAreEstimated(Rule):
    """A module is called in evaluation mode, and divides its weight by an estimate that no iteration has made.

    `torch.nn.utils.spectral_norm` divides a weight W by u'Wv, and improves u and v in forward passes in training mode
    only. After one such pass, u'Wv is ||Wv||; with the random vectors of a fresh module it is about 0, so the weight
    becomes far too large. The rule finds estimates below half of ||Wv||. Weights from a checkpoint bring their u and v.
    Training repairs the estimate, so the rule only warns.
    """

    name = "no-spectral-norm"
    finds = "A layer with spectral norm is evaluated before its norm was estimated."
    warns = True

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        for key, entry in sites(table, stage=ESTIMATE):
            if not key.call and not entry.unobserved:
                yield self._found(key, entry, step=step)

    def _found(self, key: SiteKey, entry: MergedSite, *, step: int) -> Finding:
        value = number(entry.summary)
        message = (
            f"{key.path} is evaluated before its spectral norm was estimated: what it is divided by is {value:.2g} x "
            "what an iteration gives. torch.nn.utils.spectral_norm estimates in training mode only: call the model in "
            "training mode first, or use torch.nn.utils.parametrizations.spectral_norm."
        )
        return self.finding(entry, message, step=step, estimate=value)
