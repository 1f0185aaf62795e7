"""Parameters of several optimizers, where two runs have recorded other steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from traindiff.analyse.align.side import Side, SideStep
from traindiff.analyse.merge.site import MergedSite
from traindiff.core.observation import BEFORE


class OtherMoments:
    """Tells which parameters the two runs know from different moments of the training.

    An optimizer's parameters are recorded with its steps. What another optimizer's step finds of them is what was seen
    last, and runs that recorded other steps saw them last at other moments. What lies between is no difference of
    the runs.

    Args:
        sides: The two runs.

    Attributes:
        shared: Parameters that several optimizers hold. No number says which of them stepped last, so their updates
            cannot be compared, and how far they are apart is not known.
    """

    def __init__(self, sides: tuple[Side, Side]) -> None:
        chosen = [[side.recording.run["settings"].get(name) for name in ("every", "steps")] for side in sides]
        holders: Counter[str] = Counter()
        if chosen[0] != chosen[1]:
            for side in sides:
                held = ({path for group in groups for path in group} for groups in side.groups.values())
                holders |= Counter(path for paths in held for path in sorted(paths))
        several = any(len(side.groups) > 1 for side in sides)
        self._paths = [path for path, count in holders.items() if count == 1] if several else []
        self.shared = frozenset(path for path, count in holders.items() if count > 1)

    def without(self, steps: tuple[SideStep, SideStep]) -> tuple[SideStep, SideStep]:
        """One step of both runs, in which parameters from different moments are as far apart as all others are.

        See `MergedSite.placed`. Without the updates of those that are shared.
        """
        if self.shared:
            steps = self._without_shared(steps[0]), self._without_shared(steps[1])
        baseline, candidate = steps
        unknown = {
            path: _unknown(baseline.before[path])
            for path in self._paths
            if baseline.found_after.get(path) != candidate.found_after.get(path)
            and path in baseline.before
            and path in candidate.before
        }
        if not unknown:
            return steps
        return (
            replace(baseline, before={**baseline.before, **unknown}),
            replace(candidate, before={**candidate.before, **unknown}),
        )

    def _without_shared(self, one: SideStep) -> SideStep:
        return replace(
            one,
            table={
                key: entry for key, entry in one.table.items()
                if not (key[:2] == ("param", BEFORE) and key.path in self.shared)
            },
            updates=tuple(entry for entry in one.updates if entry.key.path not in self.shared),
        )  # fmt: skip


def _unknown(entry: MergedSite) -> MergedSite:
    """A parameter of which it is not known how far it is apart."""
    return replace(entry, exact=False, placed=False)
