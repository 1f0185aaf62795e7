"""A ConvNet in channels_last: kernels of norms whose means are off by as much in all rows of a channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import traindiff  # noqa: E402

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "instance": nn.InstanceNorm2d,
    "instance-affine": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "group": lambda channels: nn.GroupNorm(4, channels),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(norm: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), NORMS[norm](16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), NORMS[norm](32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def run(path: Path, model: nn.Module, layout: torch.memory_format) -> Path:
    model = model.to(memory_format=layout)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), torch.Generator().manual_seed(2)
    with traindiff.record(path, model, optimizer):
        for _ in range(2):
            images = torch.randn(4, 3, 64, 64, generator=data).contiguous(memory_format=layout)
            labels = torch.randint(0, 10, (4,), generator=data)
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("norm", NORMS)
def test_another_layout_is_no_finding(norm: str, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", build(norm), torch.contiguous_format)
    other = run(tmp_path / "other", build(norm), torch.channels_last)

    found = traindiff.compare(plain, other)

    assert found.verdict == "equivalent", str(found)


@pytest.mark.parametrize("norm", NORMS)
def test_a_wrong_eps_in_another_layout_is_found(norm: str, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", build(norm), torch.contiguous_format)
    wrong = build(norm)
    wrong[5].eps = 3e-4
    found = traindiff.compare(plain, run(tmp_path / "other", wrong, torch.channels_last))

    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.path) == (0, "5")
