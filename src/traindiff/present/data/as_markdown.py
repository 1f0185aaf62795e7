"""A result as Markdown: a summary for a comment on a pull request."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, Verification
from traindiff.analyse.compare.investigation import Matrix
from traindiff.analyse.counting import as_people_count
from traindiff.analyse.findings import Finding, Group, grouped, moment_text, more_line, phase_text
from traindiff.analyse.products import PRODUCT_COLUMNS, ProductTable
from traindiff.analyse.story import Chapter, Story, count_text, story_of

MOST = 10
"""Findings that are listed at most, and notes."""

_PASSED, _FAILED, _UNKNOWN = "✅", "❌", "⚠️"
_MARKS = {
    "identical": _PASSED, "equivalent": _PASSED, "healthy": _PASSED, "diverged": _FAILED, "unhealthy": _FAILED,
}  # fmt: skip


def write(result: Comparison | Verification | Verdict | Matrix, file: IO[str]) -> None:
    """The verdict, the first finding in full, further ones in a table, and what limits the verdict.

    Names from a recording are text: they make no markup, no link and no mention. Of a matrix, each combination is a
    row.
    """
    lines = list(_of_matrix(result) if isinstance(result, Matrix) else _of_story(story_of(result)))
    if isinstance(result, Verdict) and result.products is not None:
        lines += _of_products(result.products)
    file.write("\n".join(lines) + "\n")


def _of_story(story: Story) -> Iterator[str]:
    yield f"### {_MARKS.get(story.word, _UNKNOWN)} traindiff: {escaped(story.sentence)}"
    yield ""
    if len(story.recordings) == 1:
        yield code(story.recordings[0][1])
    else:
        yield ", ".join(f"{role} {code(path)}" for role, path in story.recordings)
    yield from _paragraph(story.noise)
    if story.failed:
        yield from ("", f"**The run {code(story.failed.run)} failed.** {escaped(story.failed.message)}")
    yield from _paragraph(story.compiler)
    for chapter in story.chapters:
        if chapter.noun == "finding":
            yield from _first(chapter, story.bits)
            yield from _further(chapter.further)
    yield from _paragraph(*filter(None, ("" if story.chapters else story.bits, story.counts)))
    yield from _paragraph(story.pin_note)
    for pinned in story.pinned:
        yield from _paragraph(pinned.heading)
        if pinned.findings:
            yield from ("", *_with_more(grouped(pinned.findings)[:MOST]))
    yield from _paragraph(*story.operators)
    yield from _paragraph(story.cost)
    yield from _notes([*story.alone, *story.notes, *dict.fromkeys(note for one in story.pinned for note in one.limits)])


def _paragraph(*lines: str) -> Iterator[str]:
    if any(lines):
        yield from ("", "<br>".join(escaped(line.strip()) for line in lines))


def _first(chapter: Chapter, bits: str) -> Iterator[str]:
    first = chapter.first.first
    phase = escaped(phase_text(first.phase, first.stage))
    yield ""
    yield f"**{chapter.title}:** {moment_text(first)}, {phase}, {code(first.site)}"
    yield ""
    yield f"> {escaped(first.said)}"
    yield from (f"> <br>{escaped(line)}" for line in filter(None, (*chapter.first.further, bits)))
    yield f"> <br>{escaped(more_line([first.kind]))}"


def _further(groups: Sequence[Group]) -> Iterator[str]:
    if not groups:
        return
    shown = "" if len(groups) <= MOST else f", the first {MOST}"
    yield from _folded(f"Further findings: {len(groups)}{shown}", _with_more(groups[:MOST]))


def _with_more(groups: Sequence[Group]) -> Iterator[str]:
    """A table of findings, and the command that explains them."""
    yield from (*_table(groups), "", escaped(more_line(group.first.kind for group in groups)))


def _folded(summary: str, lines: Iterable[str]) -> Iterator[str]:
    """Lines that the reader unfolds."""
    yield ""
    yield f"<details><summary>{summary}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"


def _table(groups: Iterable[Group]) -> Iterator[str]:
    yield "| step | phase | site | what | x floor |"
    yield "| ---: | --- | --- | --- | ---: |"
    for group in groups:
        one = group.first
        phase = escaped(phase_text(one.phase, one.stage))
        cells = (str(one.step), phase, _code_in_cell(group.site), escaped(one.said), _ratio(one))
        yield f"| {' | '.join(cells)} |"


def _of_matrix(matrix: Matrix) -> Iterator[str]:
    marks = {0: _PASSED, 1: _FAILED}
    yield f"### {marks.get(matrix.exit_code, _UNKNOWN)} traindiff: {escaped(count_text(matrix))}"
    yield ""
    yield f"{code(matrix.recipe)}; a report of each combination is below {code(matrix.output)}"
    yield ""
    yield "| combination | verdict | first divergence, or why it was not run |"
    yield "| --- | --- | --- |"
    for row in matrix.rows:
        yield f"| {_code_in_cell(row.name)} | {escaped(row.verdict)} | {escaped(as_people_count(row.message))} |"


def _of_products(products: ProductTable) -> Iterator[str]:
    rows = sorted(products, key=lambda row: row.ratio, reverse=True)
    if not rows:
        return
    shown = "" if len(rows) <= MOST else f", the {MOST} that are furthest from what their formats allow"
    table = (
        f"| {' | '.join(PRODUCT_COLUMNS)} |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *(f"| {' | '.join(map(escaped, row.cells))} |" for row in rows[:MOST]),
    )
    yield from _folded(f"Matrix products and convolutions, by operator and line: {len(rows)}{shown}", table)


def _code_in_cell(text: str) -> str:
    """Text as code in a table, where no code span can hold a bar behind a backslash."""
    return f"<code>{escaped(text)}</code>" if "|" in text else code(text)


def _ratio(finding: Finding) -> str:
    return f"{finding.ratio:.3g}" if math.isfinite(finding.ratio) and finding.ratio else ""


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield ""
        yield from (f"- {escaped(note)}" for note in notes[:MOST])
        if len(notes) > MOST:
            yield f"- ... and {len(notes) - MOST} more."


def code(text: str) -> str:
    """Text as code, whatever it holds."""
    text = re.sub(r"\s+", " ", text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text[:1] in ("`", "") or text[-1:] == "`" else ""
    return f"{fence}{space}{text}{space}{fence}"


def escaped(text: str) -> str:
    """Text that means nothing else in Markdown."""
    plain = html.escape(re.sub(r"\s+", " ", text), quote=False)
    return (
        re.sub(r"([\\`*_\[\]~#])", r"\\\1", plain)
        .replace("|", "&#124;")
        .replace("@", "&#64;")
        .replace("://", ":&#47;/")
        .replace("www.", "www&#46;")
    )
