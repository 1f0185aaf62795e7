"""What a page says, before it is written as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traindiff.analyse.findings import Group
from traindiff.errors import RecordingError
from traindiff.present.page.dataflow import Node
from traindiff.storage import open_recording

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The first finding in words.

    Attributes:
        label: What it is the first of.
        where: Step, phase and site.
        message: What was found.
        further: Sentences on its size and surroundings.
        row: Its row; None where its site has none.
        step: Its step.
    """

    label: str
    where: str
    message: str
    further: tuple[str, ...]
    row: int | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Findings that say the same of several sites, as a line of a table.

    Attributes:
        group: The findings.
        row: Row of the first of them; None where its site has none.
    """

    group: Group
    row: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A site that only one run has.

    Attributes:
        run: Which one.
        phase: Phase of the site.
        site: As people read it.
        steps: In which steps it is alone, in words.
        why: Why it could not be compared; empty where the other run has none.
    """

    run: str
    phase: str
    site: str
    steps: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All that a page shows.

    Attributes:
        about: `comparison` or `check`.
        recordings: What each recording is to the page, and its path.
        word: The verdict in a word.
        rest: What follows it in its sentence.
        own: How noisy the baseline is by itself; empty where it was not measured.
        headline: The first finding, if there is one.
        facts: Numbers of what was compared or checked, with what they count.
        flow: The dataflow around the first finding: columns of sites.
        findings: All of them.
        representation: What differs only in how it is represented.
        alone: Sites that only one run has.
        notes: What limits the verdict, one sentence each.
        settings: What the runs say of themselves.
        data: For the script: rows, columns, numbers, curves.
    """

    about: str
    recordings: tuple[tuple[str, str], ...]
    word: str
    rest: str
    own: str
    headline: Headline | None
    facts: tuple[tuple[int, str], ...]
    flow: Sequence[Sequence[Node]]
    findings: tuple[Found, ...]
    representation: tuple[Found, ...]
    alone: tuple[Alone, ...]
    notes: tuple[str, ...]
    settings: Sequence[Setting]
    data: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What stands in the browser's tab."""
        return f"{self.word}: {' and '.join(path for _, path in self.recordings)}"
