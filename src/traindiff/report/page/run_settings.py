"""What two runs say of themselves, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traindiff.errors import RecordingError
from traindiff.recording import open_recording

SECTIONS = ("created", "command", "world_size", "mesh", "recipe", "forced_by", "settings", "versions", "environment",
            "source")  # fmt: skip
"""Parts of `run.json` that a page shows, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the table.

    Attributes:
        name: Where it stands in `run.json`, with dots.
        values: Of each run, as text; empty where a run says nothing of it.
        differs: Whether the runs say different things.
    """

    name: str
    values: tuple[str, ...]
    differs: bool


def run_settings(paths: Sequence[str]) -> list[Setting]:
    """What `run.json` of each recording says; nothing where one cannot be read.

    Args:
        paths: Of one recording, or of two.
    """
    try:
        runs = [dict(_flat(_shown(open_recording(path).run))) for path in paths]
    except (RecordingError, OSError):
        return []
    names = dict.fromkeys(name for run in runs for name in run)
    found = []
    for name in names:
        values = tuple(run.get(name, "") for run in runs)
        found.append(Setting(name=name, values=values, differs=len(set(values)) > 1 and name != "created"))
    return found


def _shown(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in SECTIONS if name in run}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            yield f"{before}{name}", " ".join(value) if name == "command" else ", ".join(value) or "none"
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value)
