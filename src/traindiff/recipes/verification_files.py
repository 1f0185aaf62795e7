"""What a verification leaves in its directory beside the recordings."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from traindiff.comparison import Verification
from traindiff.report import as_json
from traindiff.report.verification import print_verification

REPORT, JSON = "report.txt", "verification.json"

_WIDTH = 200
_ROWS = 50


def write_files(verification: Verification, directory: Path) -> None:
    """Write the report as text, and as JSON, each at once: a reader sees the earlier one or this one.

    Args:
        verification: What to write.
        directory: Where; made if it is not there.
    """
    text, values = io.StringIO(), io.StringIO()
    print_verification(Console(file=text, width=_WIDTH, highlight=False), verification, top=_ROWS)
    as_json.write(verification, values)
    write_whole(directory / REPORT, text.getvalue())
    write_whole(directory / JSON, values.getvalue())


def write_whole(path: Path, content: str) -> None:
    """Write a file at once: a reader sees what was there before, or all of this."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)
