"""The words of traindiff, the kinds of finding, the rules, and the pages, each with its explanation."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from traindiff.analyse.check import RULES, Rule
from traindiff.errors import ConfigError, Problem
from traindiff.present.documentation import page, pages, title_of

SCHEMA_NAME = "traindiff-explanation"

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The explanation of a term.

    Attributes:
        name: The term.
        also: Other names of it.
        text: The explanation, in Markdown.
        page: The page of the documentation that says more; empty where there is none.
    """

    name: str
    also: tuple[str, ...] = ()
    text: str
    page: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of finding, or several that belong together.

    Attributes:
        names: Its names.
        group: The group of kinds to which it belongs, as a sentence.
        text: What such a finding looks like.
        evidence: How it is recognized; may be empty.
    """

    names: tuple[str, ...]
    group: str
    text: str
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One meaning of a name.

    Attributes:
        name: The name, as it is written.
        what: What it is a name of, e.g. `kind of finding`.
        text: The explanation, in Markdown.
        recognized_by: Of a kind of finding, how it is recognized; may be empty.
        needs: Of a rule, what a recording must have for it to judge anything; may be empty.
        limits: Of a rule, its limits: name, default, and what it is.
        more: The pages of the documentation that say more, or have the same name.
    """

    name: str
    what: str
    text: str
    recognized_by: str = ""
    needs: str = ""
    limits: tuple[tuple[str, float, str], ...] = ()
    more: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The explanation in the schema of `traindiff explain --json`."""
        return {
            "name": self.name,
            "what": self.what,
            "text": self.text,
            "recognized_by": self.recognized_by,
            "needs": self.needs,
            "limits": [{"name": name, "default": value, "message": text} for name, value, text in self.limits],
            "more": [f"traindiff explain {one}" for one in self.more],
        }

    def __str__(self) -> str:
        if self.what == PAGE:
            return self.text
        recognized = f" Recognized by: {self.recognized_by}." if self.recognized_by else ""
        named = f"{self.name}:" if self.what == TERM else f"{self.name}, a {self.what}."
        limits = [f"  {name} = {value:g}: {text}" for name, value, text in self.limits]
        needs = f"It needs {self.needs}. In a run without, it is not applicable." if self.needs else ""
        parts = [f"{named} {self.text}{recognized}", needs, "\n".join(["Limits:", *limits]) if limits else ""]
        more = f"More: {', '.join(f'traindiff explain {one}' for one in self.more)}" if self.more else ""
        return "\n\n".join(filter(None, (*parts, more)))


TERM, KIND, RULE, RELATION, RESTORED, PAGE = (
    "term", "kind of finding", "rule of traindiff check", "relation that traindiff weights finds",
    "thing that traindiff resume finds", "page",
)  # fmt: skip
"""What a name is a name of."""

TITLES: Mapping[str, str] = {
    TERM: "Terms",
    KIND: "Kinds of finding",
    RULE: "Rules of traindiff check",
    RELATION: "Relations that traindiff weights finds",
    RESTORED: "Things that traindiff resume finds not restored",
    PAGE: "Pages",
}
"""The title of all names of a sort."""


@cache
def glossary() -> tuple[tuple[Entry, ...], tuple[Kind, ...]]:
    """All terms and all kinds of finding, in the order of the file `glossary.toml`."""
    content = _content()
    terms = tuple(Entry(**{**one, "also": tuple(one.get("also", ()))}) for one in content["term"])
    return terms, tuple(Kind(**{**one, "names": tuple(one["names"])}) for one in content["kind"])


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(files("traindiff.present").joinpath("glossary.toml").read_text(encoding="utf-8"))


def known_names() -> dict[str, tuple[str, ...]]:
    """All names that can be explained, by what they are names of: the titles in `TITLES`."""
    found: dict[str, dict[str, None]] = {title: {} for title in TITLES.values()}
    for _, meaning in _explanations():
        found[TITLES[meaning.what]][meaning.name] = None
    return {title: tuple(names) for title, names in found.items()}


def explain(name: str) -> list[Explanation]:
    """Every meaning of a term, a kind of finding or a rule; if there is none, the page of this name.

    Args:
        name: The name, in upper or lower case, with spaces, hyphens or underscores. With `.md` at its end, it is the
            name of a page.

    Raises:
        ConfigError: Nothing has this name.
    """
    found = _meanings(name)
    if not found:
        raise ConfigError("explain", [_unknown(name)], consequence="nothing was explained")
    return found


def explain_all(words: list[str]) -> list[Explanation]:
    """What these words mean together, as `noise floor` does, or else what each of them means.

    Raises:
        ConfigError: Neither all together nor each of them is known.
    """
    together = " ".join(words)
    if found := _meanings(together):
        return found
    each = [_meanings(word) for word in words]
    return [one for meanings in each for one in meanings] if all(each) else explain(together)


def explained(asked: str | None, found: list[Explanation]) -> dict[str, Any]:
    """The object that `traindiff explain --json` prints."""
    return {
        "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
        "asked": asked,
        "known": {title: list(names) for title, names in known_names().items()},
        "explanations": [one.to_json() for one in found],
    }


def _meanings(name: str) -> list[Explanation]:
    wanted = _plain(name)
    if not name.lower().endswith(".md"):
        found = [one for known, one in _explanations() if one.what != PAGE and _plain(known) == wanted]
        named = [f"{one}.md" for one in pages() if _plain(one) == wanted]
        if found:
            return [replace(one, more=tuple(dict.fromkeys([*one.more, *named]))) for one in found]
    wanted = wanted.removesuffix(".md")
    return [Explanation(name=one, what=PAGE, text=page(one)) for one in pages() if _plain(one) == wanted]


def _unknown(name: str) -> Problem:
    known = {_plain(one): one for one, _ in _explanations()}
    begun = [one for one in known if any(word.startswith(_plain(name)) for word in one.split())]
    near = begun or get_close_matches(_plain(name), known, n=3, cutoff=0.7)
    meant = " or ".join(f'"{known[one]}"' for one in near[:3])
    fix = f"Did you mean {meant}? " if meant else ""
    return Problem(
        where=f"explain {name}",
        what="is no term, kind of finding, rule or page.",
        fix=f"{fix}traindiff explain lists all.",
    )


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


def _explanations() -> Iterator[tuple[str, Explanation]]:
    """Every name with each of its meanings. Of a page, the text is its title."""
    terms, kinds = glossary()
    for entry in terms:
        for name in (entry.name, *entry.also):
            yield (
                name,
                Explanation(name=entry.name, what=TERM, text=entry.text, more=(entry.page,) if entry.page else ()),
            )
    for kind in kinds:
        text = f"{kind.group}: {kind.text}."
        for name in kind.names:
            yield (
                name,
                Explanation(name=name, what=KIND, text=text, recognized_by=kind.evidence, more=("findings.md",)),
            )
    for rule in RULES:
        yield rule.name, _of_rule(rule)
    for one in _content()["relation"]:
        text = f"{one['text'][0].upper()}{one['text'][1:]}."
        yield one["name"], Explanation(name=one["name"], what=RELATION, text=text, more=("weights.md",))
    for one in _content()["restored"]:
        text = f"For example: {one['text']}"
        yield one["name"], Explanation(name=one["name"], what=RESTORED, text=text, more=("resume.md",))
    for name in pages():
        yield name, Explanation(name=name, what=PAGE, text=title_of(name))


def _of_rule(rule: type[Rule]) -> Explanation:
    effect = "It warns, and leaves the run healthy." if rule.warns else "It makes a run unhealthy."
    return Explanation(
        name=rule.name,
        what=RULE,
        text="\n\n".join(filter(None, (f"{rule.finds} {effect}", inspect.getdoc(rule)))),
        needs=rule.needs,
        limits=tuple((name, limit.default, limit.message) for name, limit in rule.limits.items()),
        more=("rules.md",),
    )
