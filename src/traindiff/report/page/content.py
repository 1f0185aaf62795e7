"""What a page says, before it is written as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traindiff.findings.groups import Group
from traindiff.report.page.dataflow import Node
from traindiff.report.page.run_settings import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The first finding in words.

    Attributes:
        label: What it is the first of.
        where: Step, phase and site.
        says: What was found.
        further: Sentences on its size and surroundings.
        row: Its row; None where its site has none.
        step: Its step.
    """

    label: str
    where: str
    says: str
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
