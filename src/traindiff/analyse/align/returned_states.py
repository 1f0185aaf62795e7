"""Inputs of a model that are its own outputs: the hidden state of a recurrent model, what it predicted before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair, difference, differs_at_random
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.core.observation import ITSELF, SAMPLE
from traindiff.core.site import label
from traindiff.core.summary import UNIT_ROUNDOFF, merge, rounding

_Elements = tuple[int, int]
"""Number of elements, and a fingerprint of them that does not depend on their order."""


@dataclass(slots=True)
class ReturnedStates:
    """Knows which inputs of a run hold the elements of an output: of the step before, or of an earlier call.

    A training may cut a batch, or join it again, so that only all elements of a step together are looked at.

    Attributes:
        sources: By input, in the latest step: the output that it is, in words.
        before: The outputs of the latest evaluation, in words, by their elements.
    """

    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    before: Mapping[_Elements, str] = field(default_factory=dict)

    def see(self, tables: Sequence[StepTable]) -> None:
        """Note a step, with a table for each evaluation of the loss; steps must be given in order."""
        self.sources = {}
        for table in tables:
            outputs = {
                elements: label(key.path, key.slot)
                for key, elements in _whole(table, "forward").items()
                if elements is not None
            }
            known = {**self.before, **outputs}
            for key, elements in _whole(table, "batch").items():
                if elements is not None and elements in known:
                    self.sources[key.path, key.slot] = known[elements]
            self.before = outputs

    def follow(self, other: ReturnedStates) -> None:
        """Take over what is known of the other run, which had the same bits in all that this depends on."""
        self.sources, self.before = dict(other.sources), other.before


Sources = tuple[Mapping[tuple[str, str], str], Mapping[tuple[str, str], str]]
"""`ReturnedStates.sources` of both runs."""

_MOST = 1e-3
"""Relative difference above which an input is not taken for something that was computed from earlier outputs."""

RETURNED = ", as what the model returned before does"
ROUNDED = " by no more than rounding, as what is computed before the model reads it does"
COMPUTED = " by no more than what the model returned before does, and may be computed from that"
"""Why inputs differ that are no other batch, after "differ from step 1 on"."""


def check_state(pair: Pair, other: Finding, sources: Sources, *, noise: float) -> Finding | str:
    """Compare an input of the root that may be an output of it, or computed from one, or from the data.

    Args:
        pair: Both inputs, which differ.
        other: The finding if it is a part of the batch.
        sources: What is known of both runs' inputs.
        noise: Largest relative difference of what the model returned so far, where that is within its floor; infinite
            after a divergence.

    Returns:
        The finding; or why it is none, as one of the constants above. Each run may hand the model what it returned
        itself, in the same order as far as that is known. Or the inputs differ by no more than rounding, or than what
        was returned before does: what is read from the data has the same bits in both runs, or is altogether different.
    """
    site = (pair.baseline.key.path, pair.baseline.key.slot)
    own, size = [one.get(site) for one in sources], difference(pair) or math.inf
    placed = pair.baseline.placed and pair.candidate.placed
    if all(own):
        return other if placed and size > GAIN * noise else RETURNED
    if any(own):
        run, without = ("baseline", "candidate") if own[0] else ("candidate", "baseline")
        message = (
            f"In the {run}, {label(*site)} is what {own[0] or own[1]} was before. In the {without} it is not: is a "
            "state lost, or changed on its way?"
        )
        return replace(other, message=message)
    if placed and _is_rounded(pair, size):
        return ROUNDED
    return COMPUTED if size <= min(_MOST, GAIN * noise) else other


_ANY_ERROR = 4.0 * UNIT_ROUNDOFF["float32"]
"""Relative difference up to which it may be a factor or a shift, as of data that are divided by their deviation."""


def _is_rounded(pair: Pair, size: float) -> bool:
    """True if rounding explains how far an input is apart, which may be computed in float32 whatever its dtype is."""
    dtype = pair.baseline.dtype
    if dtype != pair.candidate.dtype or dtype not in UNIT_ROUNDOFF:
        return False
    once = max(rounding("float32"), rounding(dtype))
    return size <= _ANY_ERROR or (size <= once and differs_at_random(pair))


GAIN = 8.0
"""How far a computation outside the model may enlarge a relative difference."""


def _whole(table: StepTable, phase: str) -> dict[SiteKey, _Elements | None]:
    """The elements of each site of numbers, over all calls and micro-steps; None if they are not known, or constant."""
    sites: dict[SiteKey, list[MergedSite]] = {}
    for key, entry in table.items():
        if key[:2] == (phase, "") and key.stage != SAMPLE and key.path not in ("rng", ITSELF) and entry.shape:
            sites.setdefault(key.of_calls, []).append(entry)
    return {site: _elements(entries) for site, entries in sites.items()}


def _elements(entries: Iterable[MergedSite]) -> _Elements | None:
    entries = list(entries)
    if any(one.unobserved or not one.exact or one.dtype not in UNIT_ROUNDOFF for one in entries):
        return None
    whole = merge([one.summary for one in entries]) if len(entries) > 1 else entries[0].summary
    if float(whole["minimum"]) == float(whole["maximum"]):
        return None
    return int(whole["count"]), int(whole["multiset"])
