"""A tensor on another device is read there: nothing waits, and what is found is judged when its numbers have come."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.nonfinite.trainings import WIDTH, Net
from traindiff.core.settings import record_settings
from traindiff.observe.torch.nonfinite.reading import Reader
from traindiff.observe.torch.nonfinite.settings import watch_settings
from traindiff.observe.torch.nonfinite.watch import _OBSERVE
from traindiff.observe.torch.nonfinite.watcher import Watcher
from traindiff.observe.torch.session.targets import find_targets

SETTINGS: dict[str, Any] = {
    "frames": 21, "trace": (), "abort_after": None, "on_detect": "raise", "output": None, "masks": (), "nonfinite": (),
    "warn": (), "keep_inputs": False,
}  # fmt: skip


def watch(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> tuple[Watcher, io.StringIO]:
    """A watch that takes the CPU for a device that works on its own."""
    file = io.StringIO()
    targets = find_targets(model, optimizer, select=("*",))
    observed = record_settings(observe=_OBSERVE)
    checked = watch_settings(**{**SETTINGS, **settings, "file": file})
    return Watcher(targets, checked, observed, reader=Reader(frozenset())), file


class Masked(Net):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        mask = torch.zeros_like(scores)
        mask[:, 0] = -math.inf
        return self.softmax(scores + mask)

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)


@pytest.mark.parametrize("kind", [Net, Masked])
def test_a_healthy_training_prints_nothing(kind: type[Net]) -> None:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher, file = watch(model, optimizer)
    with watcher:
        for _ in range(4):
            model(torch.randn(4, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda model: setattr(model.scale, "factor", math.inf), "scale output holds"),
        (lambda model: setattr(model.steep, "factor", math.inf), "comes back to scale output holds"),
        (
            lambda model: setattr(model, "between", math.inf),
            "last input\\[0\\] holds .*, made by the code of \\(root\\)",
        ),
    ],
)
def test_the_origin_is_the_same_one_step_late_at_most(break_: Any, message: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher, file = watch(model, optimizer)

    def steps() -> None:
        for step in range(4):
            if step == 1:
                break_(model)
            model(torch.randn(4, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with watcher, pytest.raises(traindiff.NonFiniteError, match=message) as caught:
        steps()
    assert "during batch_number=1." in str(caught.value)
    assert watcher.step in (2, 3)
    frames = file.getvalue().split("Last ")[1]
    assert frames.count("(root) Net") <= 2


def test_no_tensor_is_kept_until_its_numbers_have_come() -> None:
    import gc
    import weakref

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher, _ = watch(model, optimizer)
    kept: list[Any] = []
    model.act.register_forward_hook(lambda _, __, output: kept.append(weakref.ref(output)))
    with watcher:
        model(torch.randn(4, WIDTH)).sum().backward()
        gc.collect()
        assert kept[0]() is None
        optimizer.step()


def test_what_is_found_last_is_said_when_the_watch_is_closed() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher, file = watch(model, optimizer)
    model.scale.factor = math.inf
    with pytest.warns(traindiff.TraindiffWarning, match="scale output holds"), watcher:
        model(torch.randn(4, WIDTH)).sum()
    assert "scale Scale" in file.getvalue()
