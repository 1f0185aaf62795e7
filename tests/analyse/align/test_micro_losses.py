"""How the losses of micro-batches combine follows from their gradients, whatever the trainer's convention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff


class Classifier(nn.Module):
    """Returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor, num_items: int | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.fc(x)))
        if num_items is None:
            loss = functional.cross_entropy(logits, labels)
        else:
            loss = functional.cross_entropy(logits, labels, reduction="sum") / num_items
        return {"loss": loss, "logits": logits}


def train(path: Path, parts: int, how: str, scale: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            x, labels = torch.randn(12, 6, generator=data), torch.randint(5, (12,), generator=data)
            for one, wanted in zip(x.chunk(parts), labels.chunk(parts), strict=True):
                if how == "shares of a sum":
                    loss = model(one, wanted, 12)["loss"]
                else:
                    loss = model(one, wanted)["loss"]
                    loss = loss / parts if how == "means" else loss
                (loss * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", ["shares of a sum", "means"])
def test_both_conventions_are_equivalent_to_one_batch(how: str, turned: bool, scale: float, tmp_path: Path) -> None:
    runs = train(tmp_path / "whole", 1, "means", scale), train(tmp_path / "parts", 4, how, scale)
    found = traindiff.compare(*(runs[::-1] if turned else runs))
    assert (found.verdict, found.findings, found.unaligned) == ("equivalent", (), ((), ()))


def test_means_that_are_not_divided_are_found_at_the_loss(tmp_path: Path) -> None:
    found = traindiff.compare(train(tmp_path / "whole", 1, "means"), train(tmp_path / "parts", 4, "means, not divided"))
    first = found.first_divergence
    assert first is not None
    assert (first.step, first.path, first.slot, first.kind) == (0, "", "output.loss", "scale")
    assert "is 4 x the baseline's" in first.message


def test_runs_that_are_cut_alike_keep_what_was_observed(tmp_path: Path) -> None:
    runs = [train(tmp_path / name, 4, "shares of a sum") for name in ("a", "b")]
    found = traindiff.compare(*runs)
    assert found.verdict == "identical"
    assert {(row.phase, row.slot) for row in found.differences} >= {("forward", "output.loss")}
