"""Parameters of several optimizers, where two runs have recorded other steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from traindiff.analyse.align.side import Side, SideStep
from traindiff.analyse.merge.distance import are_near
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.core.observation import BEFORE, EDITED


class OtherMoments:
    """Tells which parameters the two runs know from different moments of the training.

    An optimizer's parameters are recorded with its steps. What another optimizer's step finds of them is what was seen
    last, and runs that recorded other steps saw them last at other moments. What lies between is no difference of
    the runs. Nor is what changes parameters between two steps of their optimizer, as clipping does in a WGAN: it is
    recorded with a step of the first optimizer, which does not tell before which step of theirs it happened. It is part
    of their update in a run that has recorded the step before, and not in one that begins to record with this step.

    Args:
        sides: The two runs.

    Attributes:
        shared: Parameters that several optimizers hold. No number says which of them stepped last, so their updates
            cannot be compared, and how far they are apart is not known.
        changed: Parameters with an update that was not compared, because only one run shows what the step found.
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
        self.changed: set[str] = set()
        self._not_of_first = {
            path for side in sides for groups in [*side.groups.values()][1:] for group in groups for path in group
        }

    def without(self, steps: tuple[SideStep, SideStep]) -> tuple[SideStep, SideStep]:
        """One step of both runs, in which parameters from different moments are as far apart as all others are.

        See `MergedSite.placed`. Without the updates of those that are shared.
        """
        if self.shared:
            steps = self._without_shared(steps[0]), self._without_shared(steps[1])
        baseline, candidate = steps
        changed = self._changed(baseline, candidate) if self._not_of_first else []
        self.changed.update(changed)
        unknown = {
            path: _unknown(baseline.before[path])
            for path in (*self._paths, *changed)
            if (path in changed or baseline.found_after.get(path) != candidate.found_after.get(path))
            and path in baseline.before
            and path in candidate.before
        }
        if not unknown:
            return steps
        return _with_unknown(baseline, unknown, changed), _with_unknown(candidate, unknown, changed)

    def _changed(self, baseline: SideStep, candidate: SideStep) -> list[str]:
        """The parameters of which one run alone shows what this step found, if not what the step before left."""
        updated = [{entry.key.path for entry in one.updates} & self._not_of_first for one in (baseline, candidate)]
        return [
            path for path in sorted(updated[0] & updated[1])
            if _shows(baseline, path) != _shows(candidate, path)
            and not are_near(baseline.before[path], candidate.before[path])
        ]  # fmt: skip

    def _without_shared(self, one: SideStep) -> SideStep:
        return replace(
            one,
            table={
                key: entry for key, entry in one.table.items()
                if not (key[:2] == ("param", BEFORE) and key.path in self.shared)
            },
            updates=tuple(entry for entry in one.updates if entry.key.path not in self.shared),
        )  # fmt: skip


def _shows(one: SideStep, path: str) -> bool:
    """True if a step has recorded a parameter as it found it."""
    return any(SiteKey("param", stage, path, "value") in one.table for stage in (BEFORE, EDITED))


def _with_unknown(one: SideStep, unknown: Mapping[str, MergedSite], changed: Collection[str]) -> SideStep:
    """A step with parameters of which it is not known how far they are apart, and without updates of some."""
    updates = tuple(entry for entry in one.updates if entry.key.path not in changed)
    return replace(one, before={**one.before, **unknown}, updates=updates)


def _unknown(entry: MergedSite) -> MergedSite:
    """A parameter of which it is not known how far it is apart."""
    return replace(entry, exact=False, placed=False)
