from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One thread, and no compiled code of another test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch.set_num_threads(before)
