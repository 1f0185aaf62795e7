"""What a verification leaves in its directory beside the recordings."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from traindiff.comparison import Verification
from traindiff.errors import ConfigError, CorruptRecordingError, Problem
from traindiff.report import as_json
from traindiff.report.verification import print_verification
from traindiff.untrusted import MOST_JSON_BYTES, Folder, parse

REPORT, JSON, INVESTIGATION = "report.txt", "verification.json", "investigation.json"

_WIDTH = 200
_ROWS = 50


def write_files(verification: Verification, directory: Path) -> None:
    """Write the report as text, and as JSON, each at once: a reader sees the earlier one or this one.

    Args:
        verification: What to write.
        directory: Where; made if it is not there.
    """
    text, values = io.StringIO(), io.StringIO()
    print_verification(Console(file=text, width=_WIDTH, highlight=False, emoji=False), verification, top=_ROWS)
    as_json.write(verification, values)
    write_whole(directory / REPORT, text.getvalue())
    write_whole(directory / JSON, values.getvalue())


def refuse_others_files(directory: Path, names: Sequence[str], *, jsons: Sequence[str], asked_by: str) -> None:
    """Raise if a report would replace a file that was not written by an earlier one: it is the user's own.

    Args:
        directory: Where the report will be.
        names: What its files are called.
        jsons: What a report leaves beside them: where one of these is there, they are an earlier report's.
        asked_by: The call, for messages.

    Raises:
        ConfigError: Names all of them.
    """
    others = [name for name in jsons if (directory / name).exists() and not _is_result(directory / name)]
    if not any(_is_result(directory / name) for name in jsons):
        others += [name for name in names if (directory / name).exists()]
    problems = [
        Problem(
            where=str(directory / name),
            what="was not written by an earlier report of traindiff, and would be replaced.",
            fix="Give another directory for the runs (output, --output), or move the file away.",
        )
        for name in others
    ]
    if problems:
        raise ConfigError(asked_by, problems)


def _is_result(path: Path) -> bool:
    try:
        content = parse(Folder.of(path.parent).read(path.name, limit=MOST_JSON_BYTES), where=str(path))
        return str(content["schema"]["name"]).startswith("traindiff-")
    except (OSError, CorruptRecordingError, LookupError, TypeError):
        return False


def write_whole(path: Path, content: str) -> None:
    """Write a file at once: a reader sees what was there before, or all of this."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)
