"""The error in which a file ends that cannot be used."""

from __future__ import annotations

from collections.abc import Callable

from traindiff.errors import CorruptRecordingError, TraindiffError
from traindiff.site import printable

Refuse = Callable[[str, str], TraindiffError]
"""Makes the error for a file (its path, as people know it) and what is wrong with it (a clause without a full stop)."""

_MOST_QUOTED = 80


def damaged(where: str, what: str) -> CorruptRecordingError:
    """The error for a file of a recording that is not as it was written.

    Args:
        where: The file.
        what: What is wrong with it: a clause, without a full stop at its end.
    """
    return CorruptRecordingError(
        f"{printable(where)} is damaged: {what}. Restore the file from where it was copied, or record again."
    )


def quoted(text: str) -> str:
    """A text of a stranger as messages quote it: printable, and not long."""
    shown = printable(text[: _MOST_QUOTED + 1])
    return f'"{shown if len(shown) <= _MOST_QUOTED else shown[:_MOST_QUOTED] + "..."}"'
