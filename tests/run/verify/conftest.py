"""How verifications are tested: on one thread, into an empty directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import traindiff
from tests.run.verify.recipes import mlp, one_thread
from traindiff.analyse.compare import Verification

Verify = Callable[..., Verification]


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def verify(tmp_path: Path) -> Verify:
    """Verify two steps of a candidate, against the MLP or another training."""

    def run(candidate: Any, baseline: Any = None, **options: Any) -> Verification:
        return traindiff.verify(baseline or mlp(), candidate, tmp_path / "runs", **{"steps": 2, **options})

    return run
