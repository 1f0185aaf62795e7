"""The command, in this process, and the golden recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from traindiff.cli.commands import app

Traindiff = Callable[..., Any]
GOLDEN = Path(__file__).parent.parent / "golden" / "v1"


@pytest.fixture
def traindiff(monkeypatch: pytest.MonkeyPatch) -> Traindiff:
    """Run a command in the directory of the golden recordings."""
    monkeypatch.chdir(GOLDEN)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, arguments, catch_exceptions=False)

    return run
