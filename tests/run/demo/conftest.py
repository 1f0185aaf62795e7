from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from traindiff.run.demo.loop import DemoSettings
from traindiff.run.demo.model import ModelSize


@pytest.fixture(scope="session")
def tiny() -> DemoSettings:
    size = ModelSize(num_layers=3, width=16, num_heads=2, context=8)
    return DemoSettings(size=size, batch_size=6)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for further threads, all the more beside other test processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
