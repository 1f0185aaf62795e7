"""The content of a report, put together once. Text, Markdown, JUnit XML and HTML render it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from traindiff.analyse.counting import as_people_count
from traindiff.analyse.findings import (
    Finding,
    Group,
    SiteWord,
    also_text,
    grouped,
    more_line,
    more_text,
    sizes_of,
    steps_text,
    where_text,
)
from traindiff.core.site import label

if TYPE_CHECKING:
    from traindiff.analyse.check import Verdict
    from traindiff.analyse.compare import Comparison, Pinned, Verification
    from traindiff.analyse.compare.investigation import Investigation, Matrix, Stage
    from traindiff.analyse.compare.verification import FailedRun, RunCost, Sides

MEANINGS = {
    "identical": "every recorded tensor has the same bits",
    "equivalent": "no difference exceeds its floor",
    "diverged": "the numbers part",
    "misaligned": "the runs were not given the same things to compute",
    "incomplete": "what could be compared agrees, but not everything could be",
}
"""What each word of a comparison's verdict means."""

REPRESENTED = "no loss, gradient or update differs by more than its floor"
"""What `equivalent` means where activations or the order of samples differ by more than their floors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """All findings of a report, or all warnings.

    Attributes:
        noun: `finding` or `warning`.
        title: What the first one is called, e.g. `First divergence`.
        first: The first group, which is told in full.
        further: The other groups, in execution order.
    """

    noun: str
    title: str
    first: Group
    further: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedStep:
    """A step that was run again with the baseline's tensors.

    Attributes:
        where: The step, and how it was computed.
        heading: The result, in one line.
        findings: The operations that are wrong by themselves.
        limits: What limits this judgment, e.g. tensors that could not be forced.
    """

    where: str
    heading: str
    findings: tuple[Finding, ...]
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The content of a report.

    Attributes:
        word: The verdict in a word.
        sentence: The word, its meaning, and over which steps.
        recordings: Role and path of each recording.
        runs: What was run, a line each; empty where recordings were given.
        noise: How far the baseline differs from itself when it is run again; empty where that was not measured.
        chapters: The findings, then the warnings; each only if there are any.
        bits: Where the first difference in bits is; empty if all bits are the same, and for a check.
        counts: How many sites have which word, empty where no site differs; of a check, how many rules which answer.
        alone: Which sites only one run has, a sentence each.
        notes: What else limits the verdict, a sentence each.
        failed: What happened to a candidate that did not come to its end.
        compiler: What torch's compiler said of the candidate; empty where that was not asked for.
        pin_note: Why nothing was pinned down although that was asked for; empty otherwise.
        pinned: The step of the divergence, run again.
        operators: What was found inside the modules that are wrong, a line each.
        cost: What all runs took, in one line; empty where nothing was run.
    """

    word: str
    sentence: str
    recordings: tuple[tuple[str, str], ...]
    runs: tuple[str, ...] = ()
    noise: str = ""
    chapters: tuple[Chapter, ...] = ()
    bits: str = ""
    counts: str = ""
    alone: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failed: FailedRun | None = None
    compiler: str = ""
    pin_note: str = ""
    pinned: tuple[PinnedStep, ...] = ()
    operators: tuple[str, ...] = ()
    cost: str = ""

    def __str__(self) -> str:
        return plain([*opening(self), *closing(self)])


def story_of(result: Comparison | Verification | Verdict) -> Story:
    """The content of a report of this result."""
    from traindiff.analyse.check import Verdict  # here, as results import this module for their `str()`
    from traindiff.analyse.compare import Verification

    if isinstance(result, Verdict):
        return of_check(result)
    return of_verification(result) if isinstance(result, Verification) else of_comparison(result)


def of_check(verdict: Verdict) -> Story:
    """The content of a report of a check."""
    return Story(
        word=verdict.verdict,
        sentence=verdict.sentence(),
        recordings=(("recording", verdict.recording),),
        chapters=_chapters(verdict.findings, "finding") + _chapters(verdict.warnings, "warning"),
        counts=verdict.rules_sentence(),
        notes=verdict.notes,
    )


def of_comparison(comparison: Comparison) -> Story:
    """The content of a report of a comparison."""
    return Story(
        word=comparison.verdict,
        sentence=verdict_sentence(comparison),
        recordings=(("baseline", comparison.baseline), ("candidate", comparison.candidate)),
        noise=_noise_sentence(comparison),
        chapters=_chapters(comparison.findings, "finding", title="First divergence"),
        bits=bits_sentence(comparison),
        counts=sites_sentence(comparison),
        alone=tuple(_alone(comparison)),
        notes=comparison.notes,
    )


def of_verification(verification: Verification) -> Story:
    """The content of a report of a verification."""
    comparison, word = verification.comparison, verification.verdict
    free = of_comparison(comparison)
    return replace(
        free,
        word=word,
        sentence=free.sentence if word == free.word else f"{word}; the free runs are {free.sentence}",
        runs=what_is_run(verification.sides, verification.output),
        failed=verification.failed,
        compiler=verification.compiler.message if verification.compiler else "",
        pin_note=verification.pin_note,
        pinned=tuple(_pinned(one, comparison) for one in verification.pinned),
        operators=tuple(_operators(verification)),
        cost=cost_text(verification.costs, verification.peak_bytes),
    )


def verdict_sentence(comparison: Comparison) -> str:
    """The word, its meaning, and over which steps."""
    word = comparison.verdict
    if word == "incomplete" and not comparison.steps:
        return f"{word}: nothing could be compared"
    calibration = "" if comparison.calibrated or word == "identical" else " (uncalibrated)"
    meaning = REPRESENTED if word == "equivalent" and comparison.representation else MEANINGS[word]
    if word in ("identical", "equivalent"):
        meaning += _except_for(comparison)
    return f"{word}{calibration}: {meaning}, over {steps_text(comparison.steps)}"


def _except_for(comparison: Comparison) -> str:
    """Which sites differ although the runs are called the same; empty if there are none."""
    counts = ((comparison.accepted_sites, "accepted"), (comparison.ignored_sites, "ignored"))
    said = [f"{count} {word} site{'' if count == 1 else 's'}" for count, word in counts if count]
    return f", except at {' and '.join(said)}" if said else ""


def bits_sentence(comparison: Comparison) -> str:
    """Where the first difference in bits is; empty if the verdict says that there is none."""
    first, divergence = comparison.first_bit_difference, comparison.first_divergence
    if comparison.verdict == "identical" or not comparison.steps:
        return ""
    if first is None:
        return "First difference in bits: none is known."
    if divergence is not None and is_same_place(first, divergence):
        return "First difference in bits: the same place."
    return f"First difference in bits: {where_text(first)}. {first.said}"


def is_same_place(one: Finding, other: Finding) -> bool:
    """True if two findings are at one site in one step."""
    return (one.step, one.phase, one.stage, one.path, one.slot, one.call) == (
        other.step, other.phase, other.stage, other.path, other.slot, other.call
    )  # fmt: skip


_OF_SITES: Mapping[SiteWord, str] = {
    "identical": "identical",
    "within": "within their floors",
    "above": "above",
    "follows": "that follow from the first divergence",
    "not judged": "not judged",
}


def sites_sentence(comparison: Comparison) -> str:
    """How many sites have which word; empty if all sites are identical."""
    total = sum((words := comparison.words).values())
    if words["identical"] == total:
        return ""
    said = _OF_SITES if comparison.findings else {**_OF_SITES, "follows": "that follow from these"}
    counts = ", ".join(f"{words[word]} {text}" for word, text in said.items() if words[word])
    return f"{total} sites: {counts}."


def representation_note(found: Sequence[Finding]) -> str:
    """The note on differences in how things are represented, while the runs learn the same."""
    first, more = found[0], more_text(len(found) - 1, "site", before=" and at")
    learned = "gradient" if any(one.phase == "loss" for one in found) else "loss, gradient"
    return (
        f"The representation differs, not the computation: {where_text(first)}{more}, while no {learned} or "
        f"update does. {first.said}"
    )


def what_is_run(sides: Sides, output: str) -> tuple[str, ...]:
    """Lines that name both runs and the place of their files."""
    baseline, candidate = sides
    return (
        f"baseline   {baseline.recipe} ({baseline.message})",
        f"candidate  {candidate.recipe} ({candidate.message})",
        f"files      {output}",
    )


def cost_text(runs: Sequence[RunCost], peak_bytes: int) -> str:
    """Number of steps, time and memory of some runs, in one line."""
    steps, seconds = sum(run.num_steps for run in runs), sum(run.seconds for run in runs)
    memory = f", {peak_bytes / 1e6:.0f} MB at most" if peak_bytes else ""
    return f"{len(runs)} runs, {steps} steps, {seconds:.1f} s{memory}."


def count_text(matrix: Matrix) -> str:
    """The number of combinations of a matrix for each verdict."""
    words = dict.fromkeys(row.verdict for row in matrix.rows)
    counts = ", ".join(f"{sum(row.verdict == word for row in matrix.rows)} {word}" for word in words)
    return f"{len(matrix.rows)} combination{'' if len(matrix.rows) == 1 else 's'}: {counts}."


def _chapters(findings: Sequence[Finding], noun: str, *, title: str = "") -> tuple[Chapter, ...]:
    groups = grouped(findings)
    if not groups:
        return ()
    return (Chapter(noun=noun, title=title or f"First {noun}", first=groups[0], further=tuple(groups[1:])),)


def _noise_sentence(comparison: Comparison) -> str:
    own = (comparison.noise or {}).get("own")
    if own is None:
        return ""
    size, where = own["difference"], own["where"]
    if size == 0:
        return "Your baseline's own noise is 0: run again, it gives the same bits."
    if size is None:
        return f"Your baseline's own noise is without bound: run again, whole numbers or NaN differ in {where}."
    return f"Your baseline's own noise is {size:.2g} at most: run again, it differs by that in {where}."


def _alone(comparison: Comparison) -> Iterator[str]:
    names = [[f"{label(one.path, one.slot)} ({one.phase})" for one in missing] for missing in comparison.unaligned]
    both = [name for name in dict.fromkeys(names[0]) if name in names[1]]
    alone = [[name for name in of_run if name not in both] for of_run in names]
    for side, of_run in zip(("baseline", "candidate"), alone, strict=True):
        if of_run:
            yield f"Only in the {side}: {_first_names(of_run)}."
    if all(alone):
        yield "If these are the same sites under other names: --rename PATTERN=REPLACEMENT."
    if both:
        yield f"In both runs, but in other steps, calls or passes of a step, so not compared: {_first_names(both)}."


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _pinned(pinned: Pinned, free: Comparison) -> PinnedStep:
    found = pinned.comparison.findings
    wrong = f"{'1 site is' if len(found) == 1 else f'{len(found)} sites are'} wrong alone:"
    result = wrong if found else "every operation agrees."
    return PinnedStep(
        where=pinned.where,
        heading=f"Pinned down, {pinned.where}: given the baseline's tensors, {result}",
        findings=found,
        limits=tuple(note for note in pinned.comparison.notes if note not in free.notes),
    )


def _operators(verification: Verification) -> Iterator[str]:
    if verification.zoomed is None:
        if verification.zoom_note:
            yield verification.zoom_note
        return
    lines: dict[str, str] = {}  # of several sites behind one operator, the first
    for zoom in verification.zoomed.comparison.zooms:
        lines.setdefault(zoom.operator or zoom.site, f"  {zoom.phase} of {zoom.site}: {zoom.message}")
    if lines:
        yield from (f"Operators, {verification.zoomed.where}:", *lines.values())
    else:
        yield "No operator was recorded on the way to what is wrong."


Emphasis = Literal["plain", "title", "place", "verdict", "faint", "brief"]
"""How a piece of text stands out. A `brief` line stands in place of a table where there are no tables."""

Line = tuple[tuple[str, Emphasis], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Lines that belong together; an empty line divides sections.

    Attributes:
        lines: Each in pieces, with the emphasis of each piece.
        about: The findings that a table after these lines lists, if there are any.
    """

    lines: tuple[Line, ...]
    about: Chapter | PinnedStep | Literal["operators"] | None = None


def opening(story: Story) -> list[Section]:
    """A story up to its findings: a terminal styles it, and `str()` of a result leaves the emphasis out."""
    word, _, rest = story.sentence.partition(":")
    verdict = Section(lines=(((word, "verdict"), (f":{rest}", "plain")),))
    return [
        *_section(*story.runs),
        *_section(story.noise),
        verdict,
        *(_of_chapter(chapter, story.bits if not number else "") for number, chapter in enumerate(story.chapters)),
        *_section(*filter(None, ("" if story.chapters else story.bits, story.counts))),
    ]


def closing(story: Story) -> list[Section]:
    """A story after its findings: what limits the verdict, and what is only said of runs that traindiff has made."""
    return [
        *_section(*story.alone, *story.notes),
        *_section(*(story.failed.lines() if story.failed else ())),
        *_section(story.compiler),
        *_section(story.pin_note),
        *map(_of_pinned, story.pinned),
        *_section(*story.operators, about="operators"),
        *_section(story.cost, emphasis="faint"),
    ]


def plain(parts: Sequence[Section]) -> str:
    """Sections without emphasis."""
    return "\n\n".join("\n".join("".join(text for text, _ in line) for line in part.lines) for part in parts)


def investigation_sections(investigation: Investigation) -> list[Section]:
    """The sections of an investigation's report: the two runs, the stages, and the conclusion."""
    stages = [stage_section(number, stage) for number, stage in enumerate(investigation.stages, start=1)]
    return [runs_section(investigation.sides, investigation.output), *stages, conclusion(investigation)]


def runs_section(sides: Sides, output: str) -> Section:
    """The lines of `what_is_run`."""
    return _section(*what_is_run(sides, output))[0]


def stage_section(number: int, stage: Stage) -> Section:
    """One stage of an investigation: its question and its answer."""
    return Section(
        lines=(((f"{number}. {stage.asks}", "title"),), ((f"   {as_people_count(stage.message)}", "plain"),))
    )


def conclusion(investigation: Investigation) -> Section:
    """The verdict of an investigation, and what it took."""
    cost = f"{cost_text(investigation.costs, investigation.peak_bytes)} Files: {investigation.output}"
    return Section(lines=((("Verdict: ", "plain"), (investigation.verdict, "verdict")), ((cost, "faint"),)))


def _section(*texts: str, emphasis: Emphasis = "plain", about: Literal["operators"] | None = None) -> list[Section]:
    """A section of these lines; none where there is nothing to say."""
    return [Section(lines=tuple(((text, emphasis),) for text in texts), about=about)] if any(texts) else []


def _of_chapter(chapter: Chapter, bits: str) -> Section:
    first, count = chapter.first, len(chapter.further)
    lines: list[Line] = [((f"{chapter.title}: ", "title"), (first.where, "place"))]
    lines.append(((f"  {first.first.said}", "plain"),))
    lines += [((f"  {size}", "faint"),) for size in sizes_of(first.first)]
    if also := also_text(first.paths):
        lines.append(((f"  {also}", "plain"),))
    if bits:
        lines.append(((f"  {bits}", "plain"),))
    lines.append(((f"  {more_line([first.first.kind])}", "faint"),))
    if count:
        lines.append(((f"  ({count} further {chapter.noun}{'s' if count > 1 else ''}.)", "brief"),))
    return Section(lines=tuple(lines), about=chapter)


def _of_pinned(pinned: PinnedStep) -> Section:
    lines: list[Line] = [((pinned.heading, "title"),)]
    lines += [((f"  {where_text(found)}: {found.said}", "brief"),) for found in pinned.findings]
    if pinned.findings:
        lines.append(((f"  {more_line(found.kind for found in pinned.findings)}", "faint"),))
    return Section(lines=(*lines, *(((limit, "plain"),) for limit in pinned.limits)), about=pinned)
