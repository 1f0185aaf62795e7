"""A training that was saved, for all tests of resuming."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.resume.parts import begun
from tests.run.resume.recipes import complete


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun(complete, tmp_path_factory.mktemp("resume") / "runs")
