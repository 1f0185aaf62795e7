"""Write every message into the golden file: `python -m tests.messages.generate`. Then read it in a row, as a user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.messages import (
    activations,
    command_line,
    comparing,
    gradients,
    in_tests,
    lockstep,
    reading,
    recipes,
    recording,
    rerunning,
    resuming,
    scaling,
    setups,
    showing,
    stores,
    training,
    watching,
    weights,
)
from tests.messages.provoking import Chapter, said

GOLDEN = Path(__file__).parent / "messages.txt"

CHAPTERS: Sequence[Chapter] = (
    recording.chapter,
    stores.chapter,
    training.chapter,
    watching.chapter,
    rerunning.chapter,
    reading.chapter,
    weights.chapter,
    comparing.chapter,
    recipes.chapter,
    resuming.chapter,
    setups.chapter,
    in_tests.chapter,
    lockstep.chapter,
    gradients.chapter,
    activations.chapter,
    command_line.chapter,
    showing.chapter,
    scaling.chapter,
)


def every_message() -> str:
    """The golden file's content."""
    parts = []
    for chapter in CHAPTERS:
        parts.append(f"{'=' * len(chapter.title)}\n{chapter.title}\n{'=' * len(chapter.title)}\n")
        parts += [f"## {one.title}\n\n{said(one)}\n" for one in chapter.situations]
    return "\n".join(parts)


if __name__ == "__main__":
    GOLDEN.write_text(every_message(), encoding="utf-8")
