"""How much cancels in gradients of weights whose layers do not show what they read, from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.noise.gradients import NO_CLASSES, Terms, reduced_terms, terms_by_module
from traindiff.core.summary import norm_of


@dataclass(slots=True)
class SeenSums:
    """What earlier steps tell of such gradients, as those of an LSTM.

    The norm of the terms that a gradient sums over its own has another unit, so only its change counts.

    Attributes:
        least: By gradient: how much canceled in it in the step in which that was least.
    """

    least: dict[SiteKey, float] = field(default_factory=dict)
    _sites: Sequence[SiteKey] = ()  # of the step that was judged last: the gradients
    _read: Sequence[SiteKey] = ()  # and what their terms follow from
    _classes: Mapping[str, str] = field(default_factory=dict)

    def see(
        self, pairs: Iterable[Pair], gradients: Sequence[MergedSite], terms: Mapping[str, Terms],
        classes: Mapping[str, str] = NO_CLASSES,
    ) -> None:  # fmt: skip
        """Note a step.

        Args:
            pairs: All pairs of the step.
            gradients: The gradients of such weights.
            terms: Of gradients as the optimizer used them, by path of the module.
            classes: As for `terms_by_module`.
        """
        self._sites, self._classes = [one.key for one in gradients], classes
        modules = set(map(_module, self._sites))
        self._read = [key for pair in pairs if _tells_terms(key := pair.baseline.key, modules)] if modules else []
        for one in gradients:
            self._note(one, terms)

    def see_again(self, table: StepTable, used: float) -> None:
        """Note a step that has the sites of the one before, and the same bits in both runs, and is not judged.

        Args:
            table: Its sites.
            used: As `SeenLoss.used`.
        """
        if not self._sites:
            return
        read = (Pair(baseline=table[key], candidate=table[key]) for key in self._read)
        terms = reduced_terms(terms_by_module(read, self._classes), used)
        for key in self._sites:
            self._note(table[key], terms)

    def cancellation(self, gradient: MergedSite, terms: Mapping[str, Terms]) -> float:
        """How much more cancels in a gradient than did in the step where it canceled least; at least 1.

        Args:
            gradient: One of a step that was noted.
            terms: As for `see`.
        """
        canceled, least = _canceled(gradient, terms), self.least.get(_site(gradient), 0.0)
        return max(1.0, canceled / least) if canceled is not None and least else 1.0

    def _note(self, gradient: MergedSite, terms: Mapping[str, Terms]) -> None:
        canceled, site = _canceled(gradient, terms), _site(gradient)
        if canceled is not None:
            self.least[site] = min(canceled, self.least.get(site, canceled))


def _site(gradient: MergedSite) -> SiteKey:
    return gradient.key._replace(micro_step=0)


def _module(key: SiteKey) -> str:
    return key.path.rpartition(".")[0]


def _tells_terms(key: SiteKey, modules: set[str]) -> bool:
    """True for what `terms_by_module` reads of one of these modules."""
    if key.phase == "backward":
        return key.slot == "output[0]" and key.path in modules
    return _module(key) in modules and (key.slot == "buffer" or (key.phase == "grad" and key.path.endswith(".weight")))


def _canceled(gradient: MergedSite, terms: Mapping[str, Terms]) -> float | None:
    """The norm of the terms of a gradient over its own; None if it is not known."""
    added, size = terms.get(_module(gradient.key)), norm_of(gradient.summary)
    if added is None or added.kernel in ("lookup", "bag") or not size > 0.0:
        return None
    return added.norm / size
