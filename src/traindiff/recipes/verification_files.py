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
    directory.mkdir(parents=True, exist_ok=True)
    text, values = io.StringIO(), io.StringIO()
    print_verification(Console(file=text, width=_WIDTH, highlight=False), verification, top=_ROWS)
    as_json.write(verification, values)
    for name, content in ((REPORT, text.getvalue()), (JSON, values.getvalue())):
        unfinished = directory / f"{name}.unfinished"
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(directory / name)
