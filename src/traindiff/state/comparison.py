"""The result of comparing two checkpoints: relations between tensors, a verdict, and its JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from traindiff.analyse import next_commands
from traindiff.analyse.findings import more_line
from traindiff.core.maps.entries import Layout
from traindiff.state.stored import Role

SCHEMA_NAME = "traindiff-weights"
SCHEMA_VERSION = 1

Word = Literal["identical", "equivalent", "differs", "only", "accepted"]
WORDS: tuple[Word, ...] = ("differs", "only", "accepted", "equivalent", "identical")
"""In the order in which people want to read of them."""

NUMBER = re.compile(r"(?<![^.\[/])\d+(?![^.\]/])")
"""A part of a name that is a number: of a layer, or of an expert. The digits of `w1` are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What is known of one or several tensors that belong together.

    Attributes:
        word: `identical` (the same bits), `equivalent` (the same numbers, rounded or laid out otherwise), `differs`,
            `only` (in one of the two), `accepted` (a difference that is intended).
        kind: What the relation looks like, e.g. `cast`, `fused`, `scaled` (traindiff explain weights.md).
        role: Of what the tensors are.
        baseline: Names in the baseline.
        candidate: Names in the candidate.
        message: A clause of which the candidate's tensor is the subject, or the baseline's where only it is there.
        evidence: Numbers, by name.
        layout: How the tensors of one side make up the tensor of the other; None if nothing was moved.
    """

    word: Word
    kind: str
    role: Role
    baseline: tuple[str, ...]
    candidate: tuple[str, ...]
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout | None = None

    @property
    def name(self) -> str:
        """The tensor that the message is about."""
        return (self.candidate or self.baseline)[0]

    @property
    def pattern(self) -> tuple[str, str]:
        """The name and the message, with `*` in place of the numbers in names: equal for all layers."""
        message = self.message
        for name in sorted({*self.baseline, *self.candidate}, key=lambda name: (-len(name), name)):
            message = message.replace(name, NUMBER.sub("*", name))
        return NUMBER.sub("*", self.name), message


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsComparison:
    """Whether two checkpoints hold the same model. `traindiff.weights` makes it.

    Attributes:
        baseline: The path that was given, or the type of the object.
        candidate: The path that was given, or the type of the object.
        kinds: What the two are, e.g. `safetensors`.
        relations: Every tensor of both, in the order of the candidate; those of the baseline alone come last.
        sentences: What the relations mean together, e.g. that layers are shifted.
        notes: Limits of the verdict, sentences.
        num_bytes: Bytes of elements that were read.
    """

    baseline: str
    candidate: str
    kinds: tuple[str, str]
    relations: tuple[Relation, ...]
    sentences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_bytes: int = 0

    @property
    def verdict(self) -> str:
        """`identical`, `equivalent`, `diverged` or `incomplete`."""
        words = {relation.word for relation in self.relations}
        if "differs" in words:
            return "diverged"
        if "only" in words:
            return "incomplete"
        return "identical" if words <= {"identical"} else "equivalent"

    @property
    def exit_code(self) -> int:
        """0 if identical or equivalent, 1 if diverged, 3 if incomplete."""
        return {"identical": 0, "equivalent": 0, "diverged": 1, "incomplete": 3}[self.verdict]

    @property
    def differences(self) -> tuple[Relation, ...]:
        """The relations of tensors that differ."""
        return tuple(relation for relation in self.relations if relation.word == "differs")

    def counts(self) -> dict[Word, int]:
        """Number of relations with each word."""
        return {word: sum(relation.word == word for relation in self.relations) for word in WORDS}

    def groups(self) -> list[tuple[Relation, ...]]:
        """Relations that say the same of all layers together, in the order of `WORDS`, then of the candidate."""
        found: dict[tuple[Any, ...], list[Relation]] = {}
        for relation in self.relations:
            key: tuple[Any, ...] = (relation.word, relation.kind, relation.role, *relation.pattern)
            if relation.word == "identical" and relation.kind == "identical":
                key = (relation.word, relation.kind, relation.role)
            elif relation.word == "equivalent" and not relation.layout:
                key = (relation.word, relation.kind, relation.role, relation.pattern[1])
            found.setdefault(key, []).append(relation)
        return sorted((tuple(group) for group in found.values()), key=lambda group: WORDS.index(group[0].word))

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json` (traindiff explain json), as JSON values."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "baseline": self.baseline,
            "candidate": self.candidate,
            "kinds": list(self.kinds),
            "verdict": self.verdict,
            "counts": dict(self.counts()),
            "sentences": list(self.sentences),
            "relations": [_json(relation) for relation in self.relations],
            "notes": list(self.notes),
            "num_bytes": self.num_bytes,
            "next": next_commands.explaining(one.kind for one in self.relations if one.word in ("differs", "only")),
        }

    def __str__(self) -> str:
        return "\n".join(text_lines(self))


def _json(relation: Relation) -> dict[str, Any]:
    return {
        "word": relation.word,
        "kind": relation.kind,
        "role": relation.role,
        "baseline": list(relation.baseline),
        "candidate": list(relation.candidate),
        "message": relation.message,
        "evidence": dict(relation.evidence),
    }


def title(result: WeightsComparison) -> str:
    """The verdict in a line."""
    counts = result.counts()
    total = sum(counts.values())
    tensors = f"{total} tensor{'s' if total != 1 else ''}"
    match result.verdict:
        case "identical":
            return f"identical: {tensors}, the same bits"
        case "equivalent":
            return f"equivalent: {tensors}, the same numbers {_how(result)}"
        case "diverged":
            number = counts["differs"]
            return f"diverged: {number} of {tensors} hold{'s' if number == 1 else ''} other numbers"
        case _:
            return (
                f"incomplete: {counts['only']} of {tensors} {'is' if counts['only'] == 1 else 'are'} in one of the two"
            )


def _how(result: WeightsComparison) -> str:
    kinds = {relation.kind for relation in result.relations if relation.word == "equivalent"}
    rounded, signed = kinds & {"cast", "through"}, kinds & {"bits"}
    moved = kinds - rounded - signed
    told = (("after rounding", rounded), ("in other bits", signed), ("in another layout", moved))
    ways = [text for text, found in told if found]
    if any(relation.word == "accepted" for relation in result.relations):
        ways.append("except for accepted differences")
    return " and ".join(ways)


def text_lines(result: WeightsComparison, *, top: int = 12) -> list[str]:
    """The result in lines for people: the verdict first, and what limits it last."""
    lines = [title(result), *(f"  {sentence}" for sentence in result.sentences)]
    groups = result.groups()
    for word in WORDS:
        of_word = [group for group in groups if group[0].word == word]
        if not of_word:
            continue
        lines += ["", _HEADINGS[word]]
        for group in of_word[:top] if top else []:
            lines += [f"  {line}" for line in group_lines(group)]
        if len(of_word) > top:
            more = sum(len(group) for group in of_word[top:])
            lines.append(f"  ... and {more} more tensors (--top, --json)")
        if word in ("differs", "only") and top:
            lines.append(f"  {more_line(group[0].kind for group in of_word[:top])}")
    if result.notes:
        lines += ["", *result.notes]
    return [line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]} ..." for line in lines]


_MOST_CHARACTERS = 2000
"""Of a line: names of tensors may have any length. JSON has all of them."""


_HEADINGS: Mapping[Word, str] = {
    "differs": "Other numbers", "only": "In one of the two only", "accepted": "Accepted differences",
    "equivalent": "The same numbers", "identical": "The same bits",
}  # fmt: skip


def group_lines(group: Sequence[Relation]) -> list[str]:
    """One or two lines on relations that say the same."""
    first = group[0]
    if first.kind == "identical":
        return [f"{_counted(len(group), first.role)}"]
    names = list(dict.fromkeys(relation.pattern[0] for relation in group))
    subject = first.name if len(group) == 1 else names[0]
    message = first.message if len(group) == 1 else first.pattern[1]
    if first.kind == "moved" and len(group) > 1 and numbers(first.baseline[0]) != numbers(first.candidate[0]):
        message = f"{message}, under another number"
    if len(names) > 1:
        subject = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    times = f" ({_counted(len(group), first.role)})" if len(group) > 1 else ""
    return [f"{subject}{times}", f"  {message}"]


def _counted(count: int, role: Role) -> str:
    what = {"parameter": "tensor", "optimizer": "tensor of the optimizer's state", "other": "other tensor"}[role]
    return f"{count} {what.replace('tensor', 'tensors', 1) if count != 1 else what}"


def skeleton(name: str) -> str:
    """A name with `*` in place of its numbers."""
    return NUMBER.sub("*", name)


def numbers(name: str) -> tuple[int, ...]:
    """The numbers in a name, e.g. of its layer and its expert."""
    return tuple(int(digits[:18]) for digits in NUMBER.findall(name))


def common_numbers(names: Sequence[str]) -> tuple[int, ...]:
    """The numbers that names have in common: of a layer, but not those by which its experts are told apart."""
    table = [numbers(name) for name in names]
    if not table or any(len(one) != len(table[0]) for one in table):
        return ()
    return tuple(column[0] for column in zip(*table, strict=True) if len({*column}) == 1)
