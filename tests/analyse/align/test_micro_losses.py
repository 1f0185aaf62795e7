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


def two_losses(path: Path, how: str) -> Path:
    """Two heads on one body; each loss has a backward pass of its own, or both have one."""
    torch.manual_seed(0)
    body, heads = nn.Linear(6, 16), nn.ModuleList([nn.Linear(16, 5), nn.Linear(16, 5)])
    model = nn.ModuleDict({"body": body, "heads": heads})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            x, labels = torch.randn(12, 6, generator=data), torch.randint(5, (12,), generator=data)
            hidden = torch.tanh(body(x))
            losses = [functional.cross_entropy(head(hidden), labels) for head in heads]
            if how == "one after the other":
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            elif how == "in the other order":
                losses[1].backward(retain_graph=True)
                losses[0].backward()
            elif how == "the first one":
                losses[0].backward()
            else:
                (losses[0] + losses[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("turned", [False, True])
def test_losses_with_a_backward_pass_each_are_as_their_sum(turned: bool, tmp_path: Path) -> None:
    runs = two_losses(tmp_path / "each", "one after the other"), two_losses(tmp_path / "sum", "their sum")
    found = traindiff.compare(*(runs[::-1] if turned else runs))
    assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize("how", ["their sum", "one after the other"])
def test_a_loss_without_a_backward_pass_is_found_at_the_loss(how: str, tmp_path: Path) -> None:
    found = traindiff.compare(two_losses(tmp_path / "both", how), two_losses(tmp_path / "one", "the first one"))
    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step) == ("diverged", 0)
    assert first.phase in ("loss", "backward")


def test_the_order_of_two_backward_passes_is_legal(tmp_path: Path) -> None:
    found = traindiff.compare(
        two_losses(tmp_path / "each", "one after the other"), two_losses(tmp_path / "turned", "in the other order")
    )
    assert (found.verdict, found.findings) == ("equivalent", ())
