"""Optimizers that two runs step in another order, so that recordings which found them give them each other's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from traindiff.analyse.merge.parameters import parameter_groups
from traindiff.analyse.merge.renames import Rename
from traindiff.core.observation import Observation
from traindiff.storage import Recording, ShiftedRecording, StepObservations
from traindiff.storage.manifest import ended


def with_names_of(baseline: Recording, candidate: Recording, rename: Rename) -> Recording:
    """The candidate, with the baseline's names for optimizers that hold the same parameters.

    `traindiff run` names optimizers in the order in which they first step, and counts forward and backward passes by
    the steps of the first one. So if a run steps two optimizers the other way around after one backward pass, names
    are exchanged, and the passes belong to the other optimizer. Nothing is changed unless the names of all optimizers
    are exchanged among each other, and all step equally often.
    """
    own, others = _held(baseline, lambda path: path), _held(candidate, rename)
    if own == others or own.keys() != others.keys() or len({*own.values()}) < len(own):
        return candidate
    by_parameters = {paths: name for name, paths in own.items()}
    names = {name: by_parameters.get(paths, "") for name, paths in others.items()}
    firsts = _first(baseline), _first(candidate)
    if "" in names.values() or not all(firsts) or not (_step_alike(baseline) and _step_alike(candidate)):
        return candidate
    offset = candidate.offset if isinstance(candidate, ShiftedRecording) else 0
    passes = names[firsts[1]], firsts[0]
    if candidate.is_compact and passes[0] != passes[1]:
        return candidate  # the parts of a merged step are not divided
    return _Renamed(candidate.path, offset, names, passes=passes)


class _Renamed(ShiftedRecording):
    """A recording whose optimizers have other names.

    Args:
        path: Of the recording.
        offset: What is added to the numbers of its steps.
        names: The names, by those in the recording.
        passes: The optimizer (by its new name) whose steps hold forward and backward passes, and the one to whose steps
            they are moved.
    """

    def __init__(self, path: str, offset: int, names: Mapping[str, str], passes: tuple[str, str]) -> None:
        super().__init__(path, offset)
        self._names = names
        self._passes = passes

    def rank_content(self, rank: int) -> dict[str, Any]:
        """Content of `rank.json` with the other names."""
        content = {**super().rank_content(rank)}
        content["optimizers"] = [{**one, "name": self._names[one["name"]]} for one in content["optimizers"]]
        steps = content.get("ended", {}).get("steps", {})
        content["ended"] = {**content["ended"], "steps": {self._names.get(name, name): n for name, n in steps.items()}}
        around = content.get("surroundings", {})
        content["surroundings"] = {self._of_name(where, " "): settings for where, settings in around.items()}
        return content

    def steps(
        self, rank: int, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The steps of a rank; passes come with the other optimizer."""
        held: dict[int, StepObservations] = {}
        for step in super().steps(rank, begin=begin, end=end, before=before):
            named = self._named(step)
            if named.optimizer == self._passes[0] != self._passes[1]:
                held[named.step], named = self._divided(named)
            elif named.optimizer == self._passes[1] and (passes := held.pop(named.step, None)) is not None:
                named = passes.joined(named)
            yield named

    def merged_steps(
        self, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The merged steps of a compact recording, with the other names."""
        yield from map(self._named, super().merged_steps(begin=begin, end=end, before=before))

    def _named(self, step: StepObservations) -> StepObservations:
        return replace(
            step,
            optimizer=self._names[step.optimizer],
            observations=[
                one._replace(optimizer=self._names.get(one.optimizer, one.optimizer), path=self._of_name(one.path, "."))
                for one in step.observations
            ],
            after={self._names.get(name, name): number for name, number in step.after.items()},
        )

    def _of_name(self, text: str, mark: str) -> str:
        """A text that begins with the name of an optimizer and a mark, with the other name."""
        name, found, rest = text.partition(mark)
        return f"{self._names[name]}{found}{rest}" if found and name in self._names else text

    def _divided(self, step: StepObservations) -> tuple[StepObservations, StepObservations]:
        """The passes of a step, for the other optimizer, and the optimizer's own part."""
        is_own = [_is_of_optimizer(one) for one in step.observations]
        passes, own = (
            replace(
                step,
                observations=[one for one, here in zip(step.observations, is_own, strict=True) if here == chosen],
                summaries=step.summaries[[number for number, here in enumerate(is_own) if here == chosen]],
            )
            for chosen in (False, True)
        )
        moved = [one._replace(optimizer=self._passes[1]) for one in passes.observations]
        return replace(passes, optimizer=self._passes[1], observations=moved), own


def _is_of_optimizer(seen: Observation) -> bool:
    """True for what a step of an optimizer reads and writes, and false for passes and for what precedes them."""
    return seen.phase in ("grad", "optimizer", "update", "param") and seen.stage not in ("micro", "before", "edited")


def _held(recording: Recording, rename: Rename) -> dict[str, frozenset[str]]:
    """Parameters by the name of their optimizer."""
    groups = parameter_groups(recording, rename)
    return {name: frozenset(path for group in held for path in group) for name, held in groups.items()}


def _first(recording: Recording) -> str:
    """Name of the optimizer that was found first on every rank; empty if there is none."""
    listed = [recording.rank_content(rank).get("optimizers") or [{}] for rank in recording.ranks]
    names = {found[0].get("name", "") for found in listed}
    return names.pop() if len(names) == 1 else ""


def _step_alike(recording: Recording) -> bool:
    """True if all optimizers of a recording without stored tensors have taken equally many steps."""
    counts = [ended(recording.rank_content(rank)).steps for rank in recording.ranks]
    plain = recording.run["settings"].get("detail") == ["summary"]
    return plain and all(counts) and len({number for steps in counts for number in steps.values()}) == 1
