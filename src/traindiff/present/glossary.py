"""The words of traindiff, the kinds of finding, and the rules, each with its explanation."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from traindiff.analyse.check import RULES, Rule
from traindiff.errors import ConfigError, Problem


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


@cache
def glossary() -> tuple[tuple[Entry, ...], tuple[Kind, ...]]:
    """All terms and all kinds of finding, in the order of the file `glossary.toml`."""
    content = tomllib.loads(files("traindiff.present").joinpath("glossary.toml").read_text(encoding="utf-8"))
    terms = tuple(Entry(**{**one, "also": tuple(one.get("also", ()))}) for one in content["term"])
    return terms, tuple(Kind(**{**one, "names": tuple(one["names"])}) for one in content["kind"])


def known_names() -> dict[str, tuple[str, ...]]:
    """All names that can be explained, by what they are names of."""
    terms, kinds = glossary()
    return {
        "Terms": tuple(one.name for one in terms),
        "Kinds of finding": tuple(dict.fromkeys(name for one in kinds for name in one.names)),
        "Rules of traindiff check": tuple(rule.name for rule in RULES),
    }


def explain(name: str) -> list[str]:
    """The explanation of a term, a kind of finding or a rule: a paragraph for each meaning.

    Args:
        name: The name, in upper or lower case, with spaces, hyphens or underscores.

    Raises:
        ConfigError: Nothing has this name.
    """
    wanted = _plain(name)
    found = [paragraph for known, paragraphs in _explanations() if _plain(known) == wanted for paragraph in paragraphs]
    if not found:
        raise ConfigError("explain", [_unknown(name)], consequence="nothing was explained")
    return found


def _unknown(name: str) -> Problem:
    known = {_plain(one): one for one, _ in _explanations()}
    begun = [one for one in known if any(word.startswith(_plain(name)) for word in one.split())]
    near = begun or get_close_matches(_plain(name), known, n=3, cutoff=0.7)
    meant = " or ".join(f'"{known[one]}"' for one in near[:3])
    fix = f"Did you mean {meant}? " if meant else ""
    return Problem(
        where=f"explain {name}", what="is no term, kind of finding or rule.", fix=f"{fix}traindiff explain lists all."
    )


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


def _explanations() -> Iterator[tuple[str, Sequence[str]]]:
    terms, kinds = glossary()
    for entry in terms:
        more = f" See docs/{entry.page}." if entry.page else ""
        for name in (entry.name, *entry.also):
            yield name, [f"{entry.name}: {entry.text}{more}"]
    for kind in kinds:
        evidence = f" Recognized by: {kind.evidence}." if kind.evidence else ""
        for name in kind.names:
            yield name, [f"{name}, a kind of finding ({kind.group}): {kind.text}.{evidence} See docs/findings.md."]
    for rule in RULES:
        yield rule.name, _of_rule(rule)


def _of_rule(rule: type[Rule]) -> list[str]:
    effect = "It warns, and leaves the run healthy." if rule.warns else "It makes a run unhealthy."
    limits = [f"  {name} = {limit.default:g}: {limit.message}" for name, limit in rule.limits.items()]
    parts = [f"{rule.name}, a rule of traindiff check: {rule.finds} {effect}", inspect.getdoc(rule) or ""]
    if limits:
        parts.append("\n".join(["Limits:", *limits]))
    return [*filter(None, parts[:-1]), f"{parts[-1]}\n\nSee docs/rules.md."]
