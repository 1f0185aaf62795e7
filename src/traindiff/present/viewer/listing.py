"""The page that lists the recordings under a directory, with what is known of each."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from traindiff.present.page.writing import environment, policy, styles
from traindiff.present.viewer.catalog import MOST, Listed, Recordings
from traindiff.present.viewer.looks import Answer, Looks, Question

WIDTH, HEIGHT = 120, 24
"""Size of a curve, in pixels."""

QUIET_SECONDS = 30.0
"""Time without a change after which a recording that was not closed counts as cut off, and is judged."""

AGAIN_SECONDS = 5
"""Time after which a browser asks again while recordings are looked into."""

GROWING_SECONDS = 20
"""The same while a run is recording."""

_NOTHING = Answer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A recording of the list.

    Attributes:
        one: The recording.
        address: Its name in an address.
        model: Class of the model.
        last_step: Number of its last step; empty if it is not known.
        loss: Its last loss; empty if there is none.
        about_loss: Which loss that is, and of which steps it is drawn.
        curve: Points of the curve, as in an SVG: a text for each part without a gap.
        word: The word of the verdict; empty if it is not known.
        why: Why there is no word.
    """

    one: Listed
    address: str
    model: str = ""
    last_step: str = ""
    loss: str = ""
    about_loss: str = ""
    curve: Sequence[str] = ()
    word: str = ""
    why: str = ""

    def has(self, words: Iterable[str]) -> bool:
        """True if each of the words is in its name, its model, its verdict or its ending."""
        text = " ".join((self.one.name, self.model, self.word, self.one.ending, self.one.message)).lower()
        return all(word in text for word in words)


@cache
def script() -> str:
    """The script of the list."""
    return files("traindiff.present.viewer").joinpath("listing.js").read_text(encoding="utf-8")


class Listing:
    """Writes the list. What is known of a recording is kept until its files change.

    Args:
        catalog: The recordings.
        looks: Works out what is not known. None if nothing is to be worked out.
    """

    def __init__(self, catalog: Recordings, looks: Looks | None = None) -> None:
        self._catalog = catalog
        self._looks = looks
        self._judges = "://" not in str(catalog.root)  # judging reads everything, and a store charges for that
        self._since: dict[str, tuple[str, float]] = {}

    def write(self, *, baseline: str = "", search: str = "") -> str:
        """The page.

        Args:
            baseline: Name of the recording that the others are compared with; empty for none.
            search: Words. Only recordings that have all of them are listed.
        """
        found = self._catalog.recordings()
        self._note(found)
        pinned = next((one for one in found if one.name == baseline and one.state), None)
        questions = {one.name: self._questions(one, pinned) for one in found}
        asked = [(looked, one.size_bytes) for one in found if (looked := questions[one.name][0]) is not None]
        asked += [(judged, one.size_bytes) for one in found if (judged := questions[one.name][1]) is not None]
        known = self._looks.answers(asked) if self._looks else {}
        rows = [self._row(one, *questions[one.name], known) for one in found]
        words = search.lower().split()
        listed = [row for row in rows if row.has(words) and row.one is not pinned]
        is_growing = any(one.ending == "unclosed" for one in found)
        waiting = len(asked) - len(known) if self._looks else 0
        return (
            environment("traindiff.present.viewer")
            .get_template("listing.html")
            .render(
                root=str(self._catalog.root),
                rows=listed,
                pinned=next((row for row in rows if row.one is pinned), None),
                count=len(found),
                search=search,
                waiting=waiting,
                again=AGAIN_SECONDS if waiting else GROWING_SECONDS if is_growing else 0,
                judges=self._judges,
                most=MOST if self._catalog.has_more else 0,
                width=WIDTH,
                height=HEIGHT,
                policy=policy(script(), asks=True, sends_forms=True),
                script=script(),
                styles=styles(),
            )
        )

    def _note(self, found: Sequence[Listed]) -> None:
        """Note since when each recording has been as it is."""
        now = time.monotonic()
        before = self._since
        self._since = {
            one.name: before[one.name] if one.name in before and before[one.name][0] == one.state else (one.state, now)
            for one in found
        }

    def _questions(self, one: Listed, pinned: Listed | None) -> tuple[Question | None, Question | None]:
        """What to ask for a recording: how it looks, and its verdict."""
        if one.ending in ("unread", "unreadable"):
            return None, None
        looked = Question(what="look", names=(one.name,), states=(one.state,))
        is_recording = one.ending == "unclosed" and time.monotonic() - self._since[one.name][1] < QUIET_SECONDS
        if not self._judges or is_recording:
            return looked, None
        if pinned is None or pinned is one:
            return looked, Question(what="check", names=looked.names, states=looked.states)
        names, states = (pinned.name, one.name), (pinned.state, one.state)
        return looked, Question(what="compare", names=names, states=states)

    def _row(
        self, one: Listed, looked: Question | None, judged: Question | None, known: Mapping[Question, Answer]
    ) -> Row:
        about: dict[str, Any] = {}
        look = known.get(looked, _NOTHING).found if looked else None
        if look is not None:
            losses = [(step, value) for step, value in look["losses"]]
            about = {
                "model": look["model"],
                "last_step": "" if look["last_step"] is None else f"{look['last_step']:,}",
                "loss": f"{losses[-1][1]:.5g}" if losses else "",
                "about_loss": _about(look["name"], losses),
                "curve": curve(losses),
            }
        verdict = known.get(judged, _NOTHING) if judged else _NOTHING
        return Row(
            one=one, address=quote(os.fsencode(one.name)), word=verdict.found or "", why=verdict.failed, **about
        )  # fmt: skip


def _about(name: str, losses: Sequence[tuple[int, float]]) -> str:
    if not losses:
        return ""
    (first, _), (last, _) = losses[0], losses[-1]
    return f"{name}, merged over ranks, mean of its micro-steps; {len(losses)} of the steps {first:,} to {last:,}"


def curve(losses: Sequence[tuple[int, float]]) -> list[str]:
    """Points of a curve that fills its area: a text for each part without NaN and infinities.

    Args:
        losses: Steps, ascending, each with its loss.
    """
    finite = [value for _, value in losses if math.isfinite(value)]
    if len(finite) < 2:
        return []
    low, high = min(finite), max(finite)
    first, steps = losses[0][0], max(1, losses[-1][0] - losses[0][0])
    parts: list[list[str]] = [[]]
    for step, value in losses:
        if not math.isfinite(value):
            parts.append([])
            continue
        across = 1 + (WIDTH - 2) * (step - first) / steps
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5  # halves do not overflow
        parts[-1].append(f"{across:.1f},{HEIGHT - 2 - (HEIGHT - 4) * share:.1f}")
    return [" ".join(part) for part in parts if len(part) > 1]
