"""SEEDS.md: a section for each system, and a row for each feature that the system documents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["works", "differs", "missing"]

INTRODUCTION = """# The replaced systems, feature by feature

Written by `make seeds`. For each system, a program in `benchmarks/seeds/` runs the original, in an environment of its
own, and traindiff's replacement on the same training. Then it compares what both produced: files, lines and numbers.

* *works*: the replacement did what the original did. The row says what was compared.
* *differs*: the replacement did something else on purpose. The row says why.
* *missing*: the replacement did not do it.
"""

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_ROW = re.compile(rf"^\| .* \| ({'|'.join(get_args(Outcome))}) \| .* \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature that the original documents, and what came out of comparing both.

    Attributes:
        name: As the original documents it.
        outcome: The result of the comparison.
        note: What was compared, and what came out; if it differs, why that is on purpose.
    """

    name: str
    outcome: Outcome
    note: str


def compared(name: str, problem: str, note: str) -> Feature:
    """A row that says `works` with a note, or `missing` with the problem that the comparison found."""
    return Feature(name=name, outcome="missing" if problem else "works", note=problem or note)


def differing(name: str, problem: str, note: str) -> Feature:
    """A row that says `differs` with the reason, or `missing` with the problem if the difference is another one."""
    return Feature(name=name, outcome="missing" if problem else "differs", note=problem or note)


def section(title: str, source: str, features: Sequence[Feature]) -> str:
    """The section of a system.

    Args:
        title: The system's name as its users know it.
        source: Which version of the original ran, and with what.
        features: The rows.
    """
    rows = [f"| {_cell(one.name)} | {one.outcome} | {_cell(one.note)} |" for one in features]
    return "\n".join([f"## {title}", "", source, "", "| feature | outcome | compared |", "| --- | --- | --- |", *rows])


def sections(document: str) -> dict[str, str]:
    """The sections of a document by title, in order."""
    heads = list(_SECTION.finditer(document))
    ends = [*(head.start() for head in heads[1:]), len(document)]
    return {head[1]: document[head.start() : end].strip() for head, end in zip(heads, ends, strict=True)}


def document(parts: Mapping[str, str], *, titles: Iterable[str] = ()) -> str:
    """The text of SEEDS.md.

    Args:
        parts: The sections by title, in the order in which they are written.
        titles: Of all systems; those without a section are named.
    """
    counts = {title: Counter(_ROW.findall(text)) for title, text in parts.items()}
    counts["*all*"] = sum(counts.values(), Counter())
    rows = [
        f"| {title} | {count.total()} | {count['works']} | {count['differs']} | {count['missing']} |"
        for title, count in counts.items()
    ]
    head = ["| system | features | works | differs | missing |", "| --- | --- | --- | --- | --- |"]
    left = [title for title in titles if title not in parts]
    missing = [f"Not run yet: {', '.join(left)}."] if left else []
    return "\n\n".join([INTRODUCTION.strip(), "\n".join([*head, *rows]), *missing, *parts.values()]) + "\n"


def _cell(text: str) -> str:
    """Text inside of a table: on one line, without an end of the cell."""
    return " ".join(text.split()).replace("|", "\\|")
