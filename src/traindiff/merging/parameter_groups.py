"""Parameter groups of optimizers, over all ranks: those of a pipeline may lack some, and number their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traindiff.merging.renames import Rename
from traindiff.recording import Run

Numbers = Mapping[int, Mapping[tuple[str, int], int]]
"""By rank: the number of a group in the whole model, by optimizer and the number that it has there."""


def group_numbers(recording: Run) -> Numbers:
    """Numbers of groups where the ranks of a pipeline have not all as many; empty where they do.

    As many groups on all ranks are taken for the same ones. Else, whether group 0 of one rank is group 0 of another is
    not known: each stage's groups are taken for its own, and numbered one after the other.
    """
    contents = {rank: recording.rank_content(rank) for rank in recording.ranks}
    stages = {rank: min(content["pipeline"]["stages"]) for rank, content in contents.items() if "pipeline" in content}
    counts = {rank: {one["name"]: len(one["groups"]) for one in _optimizers(contents[rank])} for rank in stages}
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
    """By rank: where settings of a group are filed, by where the rank has filed them."""
    return {
        rank: {f"{name}.groups[{old}]": f"{name}.groups[{new}]" for (name, old), new in groups.items()}
        for rank, groups in numbers.items()
    }


def _optimizers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = content.get("optimizers", [])
    return found


Groups = Mapping[str, list[list[str]]]
"""Parameters of each group of each optimizer, by the optimizer's name; from `rank.json`."""


def parameter_groups(recording: Run, rename: Rename) -> Groups:
    """Parameters of each group, of all ranks: those of a pipeline have some each."""
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
