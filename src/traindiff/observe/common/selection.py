"""The paths and optimizers that a user's arguments name, whatever the framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from traindiff.core.site import ROOT, matches
from traindiff.errors import Problem


def is_selected(patterns: Iterable[str], path: str) -> bool:
    """Whether at least one glob matches a canonical path."""
    return any(matches(pattern, path) for pattern in patterns)


def optimizers_by_name(given: object) -> dict[str, Any]:
    """The optimizers of an argument by name: one, several, or several by name."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        return {f"optimizer[{index}]": one for index, one in enumerate(given)}
    return {"optimizer": given}


def no_match(select: Sequence[str], paths: Sequence[str], *, kinds: str) -> Problem:
    """The problem that `select` matches nothing.

    Args:
        select: As the user gave it.
        paths: All canonical paths of the model.
        kinds: The kinds of objects that have these paths.
    """
    return Problem(
        where=f"record(select={list(select)!r})",
        what=f"matches none of the model's {len(paths)} {kinds}.",
        fix=f"{near(select, paths)}Paths look like: {examples(paths)} Use '*' for all of them.",
    )


def examples(paths: Iterable[str]) -> str:
    """A few of the paths that a user can select."""
    named = [path for path in paths if path] or [ROOT]
    return ", ".join(named[:3]) + (", ..." if len(named) > 3 else ".")


def near(patterns: Iterable[str], paths: Collection[str]) -> str:
    """A suggestion for misspelt patterns; empty if no path is similar."""
    similar = [match for pattern in patterns for match in get_close_matches(pattern.rstrip("*."), list(paths), n=1)]
    return f"Did you mean {similar[0]!r}? " if similar else ""
