"""A verdict as Markdown: a summary for a comment on a pull request."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, Verification, sentences
from traindiff.analyse.compare.verification import cost, pinned_heading
from traindiff.analyse.findings import Finding, Group, also_text, before_text, grouped, phase_text, size_text

MOST = 10
"""Findings that are listed, and notes."""

_MARKS = {
    "identical": "✅", "equivalent": "✅", "healthy": "✅", "diverged": "❌", "unhealthy": "❌", "misaligned": "⚠️",
    "incomplete": "⚠️",
}  # fmt: skip


def write(result: Comparison | Verification | Verdict, file: IO[str]) -> None:
    """The verdict, the first finding in full, further ones in a table, and what limits the verdict.

    Names from a recording are text: they make no markup, no link and no mention.
    """
    file.write("\n".join(_lines(result)) + "\n")


def _lines(result: Comparison | Verification | Verdict) -> Iterator[str]:
    comparison = result.comparison if isinstance(result, Verification) else result
    if isinstance(comparison, Verdict):
        sentence, notes, title = comparison.sentence(), comparison.notes, "First finding"
        named = code(comparison.recording)
    else:
        sentence, title = sentences.verdict(comparison), "First divergence"
        notes = tuple(sentences.note_lines(comparison))
        named = f"baseline {code(comparison.baseline)}, candidate {code(comparison.candidate)}"
    word = result.verdict
    other = f"{word}; the free runs are " if word != comparison.verdict else ""
    yield f"### {_MARKS[word]} traindiff: {escaped(other + sentence)}"
    yield ""
    yield named
    if isinstance(comparison, Comparison) and (own := sentences.own_noise(comparison)):
        yield from ("", escaped(own))
    if isinstance(result, Verification) and result.failed:
        yield from ("", f"**The run {code(result.failed.run)} failed.** {escaped(result.failed.message)}")
    groups = grouped(comparison.findings)
    if groups:
        yield from _first(groups[0], title)
        yield from _further(groups[1:])
    if isinstance(result, Verification):
        yield from _pinned(result)
    yield from _notes(notes)


def _first(group: Group, title: str) -> Iterator[str]:
    first = group.first
    micro = "" if first.micro_step is None else f", micro-step {first.micro_step}"
    yield ""
    yield f"**{title}:** step {first.step}{micro}, {escaped(phase_text(first.phase, first.stage))}, {code(first.site)}"
    yield ""
    yield f"> {escaped(first.message)}"
    for line in (size_text(first), before_text(first), also_text(group.paths)):
        if line:
            yield f"> <br>{escaped(line)}"


def _further(groups: Sequence[Group]) -> Iterator[str]:
    if not groups:
        return
    shown = "" if len(groups) <= MOST else f", the first {MOST}"
    yield ""
    yield f"<details><summary>Further findings: {len(groups)}{shown}</summary>"
    yield ""
    yield from _table(groups[:MOST])
    yield ""
    yield "</details>"


def _table(groups: Iterable[Group]) -> Iterator[str]:
    yield "| step | phase | site | what | x floor |"
    yield "| ---: | --- | --- | --- | ---: |"
    for group in groups:
        one = group.first
        phase = escaped(phase_text(one.phase, one.stage))
        cells = (str(one.step), phase, _code_in_cell(group.site), escaped(one.message), _ratio(one))
        yield f"| {' | '.join(cells)} |"


def _code_in_cell(text: str) -> str:
    """Text as code in a table, where no code span can hold a bar behind a backslash."""
    return f"<code>{escaped(text)}</code>" if "|" in text else code(text)


def _ratio(finding: Finding) -> str:
    return f"{finding.ratio:.3g}" if math.isfinite(finding.ratio) and finding.ratio else ""


def _pinned(verification: Verification) -> Iterator[str]:
    if verification.pin_note:
        yield from ("", escaped(verification.pin_note))
    for pinned in verification.pinned:
        yield from ("", escaped(pinned_heading(pinned)))
        if pinned.comparison.findings:
            yield from ("", *_table(grouped(pinned.comparison.findings)[:MOST]))
    yield from ("", escaped(cost(verification)))


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
