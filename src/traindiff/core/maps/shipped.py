"""Maps that traindiff has, by name, and those of users, by path."""

from __future__ import annotations

import os
from collections.abc import Sequence

from traindiff.core.maps.entries import Entry, entries_of


def map_of(given: str | os.PathLike[str] | None) -> Sequence[Entry]:
    """The entries of a map; none if none was given."""
    return () if given is None else entries_of(given)
