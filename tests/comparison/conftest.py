"""Two recordings in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.comparison.runs import Edit, record
from traindiff.comparison import Comparison, compare

Compared = Callable[..., Comparison]


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    """Compare the plain run with an edited one; `baseline_edit` edits the other one too."""

    def run(edit: Edit = lambda step, sites: None, *, baseline_edit: Edit | None = None, **options: Any) -> Comparison:
        settings = {
            name: options.pop(name) for name in ("steps", "content", "close", "run", "recorded") if name in options
        }
        number = len(list(tmp_path.iterdir()))
        baseline = record(tmp_path / f"baseline-{number}", baseline_edit or (lambda step, sites: None))
        candidate = record(tmp_path / f"candidate-{number}", edit, **settings)
        return compare(baseline, candidate, **options)

    return run
