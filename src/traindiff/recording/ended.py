"""What `rank.json` says of the end of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a training ended, as its recorder has said it when it closed the recording.

    Attributes:
        steps: How many steps each optimizer has ended, by name; empty where that is not known.
        error: What ended it before its time, as a clause; empty where nothing did, or that is not known.
    """

    steps: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


def ended(content: Mapping[str, Any]) -> Ended:
    """What a rank says of its end; nothing is known of one that was killed, or that another writer has written.

    Args:
        content: Of its `rank.json`. What in it makes no sense is left out.
    """
    said = content.get("ended")
    if not isinstance(said, dict):
        return Ended()
    counts, error = said.get("steps"), said.get("error")
    steps = {
        name: count
        for name, count in (counts.items() if isinstance(counts, dict) else ())
        if isinstance(count, int) and not isinstance(count, bool)
    }
    if not isinstance(error, dict) or not isinstance(error.get("step"), int):
        return Ended(steps=steps)
    return Ended(steps=steps, error=_says(error))


def _says(error: Mapping[str, Any]) -> str:
    step, kind, message = error.get("step"), error.get("type"), error.get("message")
    if not kind:
        return f"the program ended in the middle of step {step}"
    return f"the training was ended by {kind} in step {step}" + (f": {message}" if message else "")
