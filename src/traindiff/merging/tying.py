"""Parameters that are one in one run, and copies under several names on several ranks in the other.

A pipeline's first and last stage each hold the weight that embeds and predicts tokens. One process ties the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from traindiff.merging.renames import Rename
from traindiff.merging.step_table import Part
from traindiff.recording import Run, StepObservations

Copies = Mapping[int, Mapping[str, str]]
"""By rank: the name under which a parameter is filed by each name that it has there."""

NO_COPIES: Copies = {}

_FURTHER_TERMS = 1 << 16
"""Added to the terms that a rank has of a sum under another name: more than there are ranks, so none is a copy."""


def ties_of(recording: Run, rename: Rename = str) -> dict[str, str]:
    """Name under which a tied parameter is filed by each of its further names, on any rank."""
    return {
        rename(other): rename(path)
        for rank in recording.ranks
        for other, path in recording.rank_content(rank).get("tied", {}).items()
    }


def copies_elsewhere(recording: Run, ties: Mapping[str, str], rename: Rename = str) -> Copies:
    """Parameters of a run which the other run ties to one that this run holds on other ranks.

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
    """The observations of a rank that calls some parameters by other names. Of a sum, it has a term of its own."""
    for seen, summary in zip(step.observations, step.summaries, strict=True):
        path = names.get(seen.path)
        one = seen if path is None else replace(seen, path=path, term=seen.term + _FURTHER_TERMS * (1 + step.rank))
        yield one, step.rank, summary
