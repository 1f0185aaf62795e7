"""How much of a run's gradients the witness has checked, and why not everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import prod

from traindiff.analyse.findings import listed_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import SiteKey, StepTable
from traindiff.analyse.merge.witnessed import Witnessed
from traindiff.core.observation import WITNESS
from traindiff.core.summary import nonfinite_count
from traindiff.core.witness import EXPECTED

_WRITTEN = "the training itself changes all gradients after the backward pass"


class Coverage:
    """The gradients that were checked so far, and the reasons for the others."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._checked: set[str] = set()
        self._contributed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._missed: Counter[str] = Counter()  # steps in which a gradient was there and not checked
        self._num_steps = 0

    def see(self, table: StepTable, found: Sequence[Witnessed]) -> None:
        """Note the gradients of a step, and those of them of which both sides are known."""
        if not sites(table, stage=WITNESS):
            return
        known = {one.entry.key.path for one in found}
        self._num_steps += 1
        for key, entry in sites(table, "grad"):
            if key == SiteKey("grad", "", key.path, "grad") and not entry.unobserved:
                self._sizes[key.path] = prod(entry.shape)
                is_known = float(entry.summary["sum_of_squares"]) > 0.0 and not nonfinite_count(entry.summary)
                self._missed[key.path] += is_known and key.path not in known
            elif key.stage == WITNESS and key.slot == EXPECTED and entry.unobserved:
                self._reasons.setdefault(key.path, entry.unobserved)

    def count(self, found: Sequence[Witnessed]) -> None:
        """Note gradients that were checked."""
        self._checked.update(one.entry.key.path for one in found)
        self._contributed.update(one.entry.key.path for one in found if one.contributed)

    def leave_out(self, found: Sequence[Witnessed]) -> None:
        """Note gradients that could not be checked in a step, since the training has changed all of them."""
        self._reasons.update((one.entry.key.path, _WRITTEN) for one in found)

    def notes(self) -> Iterator[str]:
        """Sentences about the whole run."""
        whole = sum(self._sizes.values())
        if not self._checked and not self._reasons:
            if whole:
                is_missed = any(self._missed.values())
                why = "it is not known what they should be" if is_missed else "in no step were they finite"
                yield f"Witnessed are the gradients of none of {whole:,} parameters: {why}."
            return
        known = self._checked - self._contributed
        yield f"Witnessed are the gradients of {self._share(known):.1%} of {whole:,} parameters."
        if self._contributed:
            yield (
                f"Of {self._share(self._contributed):.1%}, the witness knows what backward passes contributed, but not "
                "what these should contribute, because not all that is done with them is of a kind that it knows "
                "(functions in compiled code, hooks, penalties, parametrizations, some functions): "
                f"{listed_text(sorted(self._contributed), 'parameter')}."
            )
        by_reason: dict[str, list[str]] = {}
        for path, reason in self._reasons.items():
            if path not in self._checked:
                by_reason.setdefault(reason, []).append(path)
        for reason, paths in by_reason.items():
            yield f"Not witnessed: {listed_text(paths, 'parameter')}, because {reason}."
        missed = {path: count for path, count in self._missed.items() if count and path in self._checked}
        if missed:
            reasons = dict.fromkeys(self._reasons[path] for path in missed if path in self._reasons)
            why = f", because {' or because '.join(reasons)}" if reasons else ""
            yield (
                f"Not witnessed in {max(missed.values())} of {self._num_steps} steps: "
                f"{listed_text([*missed], 'parameter')}{why}."
            )

    def _share(self, paths: Collection[str]) -> float:
        """The share of the elements of all parameters that these have."""
        whole = sum(self._sizes.values())
        return sum(size for path, size in self._sizes.items() if path in paths) / (whole or 1)
