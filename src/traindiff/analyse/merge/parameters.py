"""Parameters over all ranks: their updates, their tied copies, and the groups of optimizers that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import MergedSite, Part, SiteKey, origin
from traindiff.core.observation import EDITED
from traindiff.core.summary import SUMMARY, differences
from traindiff.storage import Run, StepObservations


class Updates:
    """Derives the update of each parameter from its values before and after a step.

    The sketch of an update is the difference of two sketches. In float64 that leaves about ten digits of an update a
    millionth the size of its parameter.

    Args:
        others: Names of all optimizers but the first one, which counts the training's steps.

    Attributes:
        parameters: By path: the parameters as they were seen last.
        ended: By path: the last step after which a parameter was seen, also as the step after it found it. It is below
            -1 if that is not known.
        found_after: The same of the parameters that the latest step found.
    """

    def __init__(self, others: Iterable[str] = ()) -> None:
        self._others = frozenset(others)
        self._left: dict[str, int] = {}  # what steps of other optimizers left in this step of the first one, and where
        self.parameters: dict[str, MergedSite] = {}
        self.ended: dict[str, int] = {}
        self.found_after: dict[str, int] = {}

    def derive(
        self, table: dict[SiteKey, MergedSite], *, step: int, optimizer: str = ""
    ) -> tuple[list[MergedSite], dict[str, MergedSite]]:
        """Entries of phase `update`, and the parameters as this step found them, by path.

        Args:
            table: The step.
            step: Its number.
            optimizer: Name of the optimizer that took it.
        """
        elsewhere: dict[str, MergedSite] = {}  # changed on ranks whose copies do not count after the step
        for key, entry in table.items():
            if key.phase == "param" and key.stage in ("before", EDITED) and key.slot == "value":
                if key.stage == EDITED and not _of_same_copy(entry, table.get(key._replace(stage=""))):
                    elsewhere[key.path] = entry.without_parts()
                    continue
                self._note_found(entry, step)
        # An update is unknown if ranks are missing before or after it.
        before, self.found_after = self.known, dict(self.ended)
        moved: list[tuple[MergedSite, MergedSite]] = []
        after = [entry for key, entry in table.items() if key[:2] == ("param", "") and key.slot == "value"]
        kept = np.array([entry.summary for entry in after], dtype=SUMMARY)  # a view would keep the step in memory
        for summary, entry in zip(kept, after, strict=True):
            path, old = entry.key.path, before.get(entry.key.path)
            if (
                old is not None
                and not entry.unobserved
                and old.shape == entry.shape
                and self.ended.get(path, step - 1) == step - 1
            ):
                moved.append((old, entry))
            self.parameters[path] = entry.without_parts(summary)
            self.ended[path] = step
        if optimizer in self._others:
            self._left.update((entry.key.path, entry.order) for entry in after)
        else:
            self._left.clear()  # places in execution order are counted anew
        return _updates(moved), {**before, **{path: entry for path, entry in elsewhere.items() if not entry.unobserved}}

    def _note_found(self, entry: MergedSite, step: int) -> None:
        """Note a parameter as a step found it, unless another optimizer has stepped since: then that is past."""
        path = entry.key.path
        if path not in self._left:
            self.ended[path] = step - 1  # later steps may not be recorded, and change it too
        elif len(entry.parts) > len({part.rank for part in entry.parts}):
            self.ended[path] = -2 - step  # changed before and after the other's step, so this may be past or not
        elif self._left[path] > entry.order:
            return
        self.parameters[path] = entry.without_parts(np.array(entry.summary)[()])

    def follow(self, other: Updates, paths: Iterable[str]) -> None:
        """Take over what another run knows of parameters, after steps in which both runs had the same of them."""
        for path in paths:
            if path in other.parameters:
                self.parameters[path] = other.parameters[path]
            self.ended.pop(path, None)
            if path in other.ended:
                self.ended[path] = other.ended[path]

    @property
    def known(self) -> dict[str, MergedSite]:
        """Those of `parameters` that have numbers."""
        return {path: entry for path, entry in self.parameters.items() if not entry.unobserved}


def _of_same_copy(edited: MergedSite, after: MergedSite | None) -> bool:
    """True if a parameter was changed on a rank whose copy counts after the step; copies may differ from then on."""
    if after is None or not after.apart:
        return True
    return after.apart[0][0] in {part.rank for part in edited.parts}


def movement(path: str, before: MergedSite, after: MergedSite) -> MergedSite:
    """The change of a parameter between two evaluations of a step, as an entry of phase `update`."""
    (update,) = _updates([(before, after)], path)
    return update


def _updates(moved: Sequence[tuple[MergedSite, MergedSite]], path: str | None = None) -> list[MergedSite]:
    """The update of each parameter from its entries before and after; under another path if that is given."""
    summaries = [np.array([pair[side].summary for pair in moved], dtype=SUMMARY) for side in (0, 1)]
    exact = np.array([before.exact and after.exact for before, after in moved], dtype=np.bool_)
    same = exact & (summaries[0]["fingerprint"] == summaries[1]["fingerprint"])
    return [
        MergedSite(
            key=SiteKey("update", "", after.key.path if path is None else path, "update"),
            order=after.order,
            dtype=after.dtype,
            shape=after.shape,
            summary=summary,
            exact=False,
            origin=origin([before, after]),
        )
        for (before, after), summary in zip(moved, differences(summaries[1], summaries[0], same), strict=True)
    ]


Copies = Mapping[int, Mapping[str, str]]
"""By rank: the path under which a parameter is filed, by each path that the rank uses."""

NO_COPIES: Copies = {}

_FURTHER_TERMS = 1 << 16
"""Added to the terms of a sum under another name. There are fewer ranks, so no term is taken for a copy."""


def ties_of(recording: Run, rename: Rename = str) -> dict[str, str]:
    """By each further name of a tied parameter, on any rank: the name under which it is filed."""
    return {
        rename(other): rename(path)
        for rank in recording.ranks
        for other, path in recording.rank_content(rank).get("tied", {}).items()
    }


def copies_elsewhere(recording: Run, ties: Mapping[str, str], rename: Rename = str) -> Copies:
    """Parameters of a run that the other run ties to a parameter which this run holds on other ranks.

    A pipeline's first and last stage each hold the weight that embeds and predicts tokens. One process ties the two.

    Args:
        recording: The run.
        ties: Of the other run, under the baseline's names.
        rename: Turns the run's paths into the baseline's.
    """
    if not ties or len(recording.ranks) < 2:
        return {}
    held = {rank: list(recording.rank_content(rank).get("parameters", {})) for rank in recording.ranks}
    own_name = {rename(path): path for paths in held.values() for path in paths}
    found: dict[int, dict[str, str]] = {}
    for rank, paths in held.items():
        for path in paths:
            first = own_name.get(ties.get(rename(path), ""))
            if first is not None and first not in paths:
                found.setdefault(rank, {})[path] = first
    return found


def under_one_name(step: StepObservations, names: Mapping[str, str]) -> Iterator[Part]:
    """Observations of a rank under other names for some parameters; a rank has its own term of a sum."""
    for seen, summary in zip(step.observations, step.summaries, strict=True):
        path = names.get(seen.path)
        one = seen if path is None else seen._replace(path=path, term=seen.term + _FURTHER_TERMS * (1 + step.rank))
        yield one, step.rank, summary


Numbers = Mapping[int, Mapping[tuple[str, int], int]]
"""By rank: the number of a group in the whole model, by optimizer and the rank's own number for it."""


def group_numbers(recording: Run) -> Numbers:
    """Numbers of groups if pipeline ranks have different counts of groups; empty if all have the same count.

    With equal counts, groups of the same number are the same group. Otherwise it is unknown whether group 0 of one rank
    is group 0 of another: each stage has groups of its own, numbered one stage after the other.
    """
    contents = {rank: recording.rank_content(rank) for rank in recording.ranks}
    stages = {rank: min(content["pipeline"]["stages"]) for rank, content in contents.items() if "pipeline" in content}
    optimizers = {rank: contents[rank].get("optimizers", []) for rank in stages}
    counts = {rank: {one["name"]: len(one["groups"]) for one in found} for rank, found in optimizers.items()}
    if len({tuple(sorted(count.items())) for count in counts.values()}) < 2:
        return {}
    by_stage = {stages[rank]: counts[rank] for rank in sorted(stages, reverse=True)}
    found: dict[int, dict[tuple[str, int], int]] = {}
    for rank, stage in stages.items():
        for name, count in counts[rank].items():
            before = sum(other.get(name, 0) for number, other in by_stage.items() if number < stage)
            found.setdefault(rank, {}).update(((name, number), before + number) for number in range(count))
    return found


def group_paths(numbers: Numbers) -> dict[int, dict[str, str]]:
    """By rank: the path of a group in the whole model, by the path that the rank uses."""
    return {
        rank: {f"{name}.groups[{old}]": f"{name}.groups[{new}]" for (name, old), new in groups.items()}
        for rank, groups in numbers.items()
    }


Groups = Mapping[str, list[list[str]]]
"""Parameters of each group of each optimizer, by the optimizer's name; from `rank.json`."""


def parameter_groups(recording: Run, rename: Rename) -> Groups:
    """Parameters of each group, joined over all ranks."""
    numbers = group_numbers(recording)
    found: dict[str, dict[int, list[str]]] = {}
    for rank in recording.ranks:
        for optimizer in recording.rank_content(rank).get("optimizers", []):
            name = optimizer["name"]
            groups = found.setdefault(name, {})
            for number, paths in enumerate(optimizer["groups"]):
                number_in_whole = numbers.get(rank, {}).get((name, number), number)
                groups.setdefault(number_in_whole, []).extend(rename(path) for path in paths)
    return {
        name: [list(dict.fromkeys(groups.get(number, ()))) for number in range(max(groups, default=-1) + 1)]
        for name, groups in found.items()
    }


def trained_parameters(recording: Run, groups: Groups, rename: Rename) -> frozenset[str]:
    """Paths of the parameters that an optimizer holds and that require a gradient.

    Args:
        recording: The run.
        groups: Its groups, with renamed paths.
        rename: Turns the run's paths into these.
    """
    contents = [recording.rank_content(rank).get("parameters", {}) for rank in recording.ranks]
    open_ones = {rename(path) for one in contents for path, about in one.items() if about.get("requires_grad", True)}
    return frozenset(path for one in groups.values() for group in one for path in group if path in open_ones)
