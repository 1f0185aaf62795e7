"""Tensors of other devices are summarized on the CPU where that is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.core.kernels.store import SummaryStore


class OnDevice:
    """A kernel that puts off the summaries of every tensor, as one on a GPU does."""

    device_types = frozenset({"cpu"})

    def __init__(self) -> None:
        self.asked = 0

    def load(self) -> Any:
        def reads(_: Tensor) -> bool:
            self.asked += 1
            return False

        return SimpleNamespace(reads=reads)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    kernel = OnDevice()
    monkeypatch.setattr(SummaryStore.__init__, "__defaults__", ((kernel,),))
    return kernel


def train(path: Path, **settings: Any) -> str:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, **settings):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    return str(path)


def test_no_kernel_of_a_device_is_asked_where_all_is_summarized_on_the_cpu(on_device: OnDevice, tmp_path: Path) -> None:
    here = train(tmp_path / "here", run_on_cpu=True)
    assert on_device.asked == 0

    there = train(tmp_path / "there")
    assert on_device.asked > 0

    assert traindiff.compare(there, here).verdict == "identical"
