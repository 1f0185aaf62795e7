"""A CTC loss sums over alignments in logarithms, whose rounding is a relative error of its gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from traindiff.core.observation import ALIGNMENTS
from traindiff.core.summary import number
from traindiff.storage import open_recording

SAMPLES, POSITIONS, CLASSES, LABELS = 6, 60, 12, 12


class Recognizer(nn.Module):
    """Gives each position of a sequence probabilities of its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(x)[0])
        return logits.log_softmax(-1)


def train(path: Path, seed: int, *, micro_batches: int = 1, factor: float = 1.0) -> None:
    """A few steps; `factor` is multiplied to what comes back from the loss in step 2."""
    torch.manual_seed(seed)
    model = Recognizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            inputs = torch.randn(SAMPLES, POSITIONS, 16, generator=draw)
            labels = torch.randint(1, CLASSES, (SAMPLES, LABELS), generator=draw)
            count = SAMPLES // micro_batches
            for first in range(0, SAMPLES, count):
                found = model(inputs[first : first + count])
                if factor != 1.0 and step == 2:
                    found.register_hook(lambda gradient: gradient * factor)
                lengths = torch.full((count,), POSITIONS), torch.full((count,), LABELS)
                loss = functional.ctc_loss(found.transpose(0, 1), labels[first : first + count], *lengths)
                (loss / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_its_size_is_recorded(tmp_path: Path) -> None:
    train(tmp_path / "run", 0)
    step = next(open_recording(str(tmp_path / "run")).steps(0))
    both = zip(step.observations, step.summaries, strict=True)
    sizes = [number(one) for seen, one in both if seen.stage == ALIGNMENTS]

    assert sizes == [pytest.approx(POSITIONS * torch.tensor(float(CLASSES)).log().item())]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_batch_in_parts_is_equivalent(seed: int, tmp_path: Path) -> None:
    train(tmp_path / "whole", seed)
    train(tmp_path / "parts", seed, micro_batches=3)

    assert traindiff.compare(tmp_path / "whole", tmp_path / "parts").verdict == "equivalent"


def test_a_gradient_of_the_loss_that_is_wrong_by_half_a_percent_is_found(tmp_path: Path) -> None:
    train(tmp_path / "right", 0)
    train(tmp_path / "wrong", 0, factor=1.005)
    first = traindiff.compare(tmp_path / "right", tmp_path / "wrong").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.kind) == (2, "backward", "scale")
