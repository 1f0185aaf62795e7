"""Intended differences of weights: they are listed, not judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traindiff.core.maps.accepted import AcceptedDifferences
from traindiff.state.comparison import Relation


def with_accepted(relations: Sequence[Relation], accepted: AcceptedDifferences) -> list[Relation]:
    """The relations, of which differences that an entry names are accepted."""
    found = []
    for one in relations:
        match = accepted.of((*one.candidate, *one.baseline)) if one.word in ("differs", "only") else None
        if match is not None:
            one = replace(one, word="accepted", message=f"{one.message} (accepted: {match.reason})")  # noqa: PLW2901
        found.append(one)
    return found
