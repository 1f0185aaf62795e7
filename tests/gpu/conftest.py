"""Trainings on a GPU. `TRAINDIFF_TEST_DEVICE=cpu` runs the same tests where there is none, to test the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.training import NAME


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    name = os.environ.get(NAME, "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products have the same bits each time
    yield torch.device(name)
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
