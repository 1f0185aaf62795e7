"""Elements that are zero in one run only: lost rows, masks, dropout that does nothing, labels that reach fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from traindiff.analyse.compare import Comparison
from traindiff.analyse.findings import Finding


class Hidden(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 64)
        self.last = nn.Linear(64, 3)
        self.between = Between(between)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.first(x)))
        return found


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.__dict__["function"] = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.__dict__["function"](x)
        return found


def trained(path: Path, between: Callable[[Tensor], Tensor]) -> Path:
    torch.manual_seed(0)
    model = Hidden(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def first_of(comparison: Comparison) -> Finding:
    assert comparison.first_divergence is not None
    return comparison.first_divergence


def without_a_row(x: Tensor) -> Tensor:
    kept = torch.ones_like(x)
    kept[3] = 0
    return x * kept


def with_gradient(path: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """A step in bfloat16 whose gradient of an embedding of ten tokens is changed behind the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 1)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        model(torch.arange(40).view(4, 10)).square().mean().backward()
        weight = model[0].weight
        weight.grad = change(weight.grad)
        optimizer.step()
    return path


def test_a_row_of_zeros_in_a_gradient_is_told_by_its_zeros(tmp_path: Path) -> None:
    def without_first(gradient: Tensor) -> Tensor:
        rounded_otherwise = (gradient * (1 + (torch.arange(50)[:, None] // 4 % 2 - 0.5) / 32)).to(gradient.dtype)
        return torch.cat([torch.zeros_like(gradient[:1]), rounded_otherwise[1:]])

    baseline = with_gradient(tmp_path / "a", lambda gradient: gradient)
    first = first_of(traindiff.compare(baseline, with_gradient(tmp_path / "b", without_first)))
    assert (first.phase, first.path, first.kind) == ("grad", "0.weight", "zeros")
    assert first.message.startswith(
        "8 of 400 elements are zero in the candidate and not in the baseline, as many as 1 of its 50 rows hold."
    )


def test_single_elements_of_zeros_in_a_gradient_are_no_row(tmp_path: Path) -> None:
    def without_a_column(gradient: Tensor) -> Tensor:
        kept = torch.ones_like(gradient)
        kept[:7, 0] = 0
        return gradient * kept

    baseline = with_gradient(tmp_path / "a", lambda gradient: gradient)
    first = first_of(traindiff.compare(baseline, with_gradient(tmp_path / "b", without_a_column)))
    assert "rows hold" not in first.message


def same(x: Tensor) -> Tensor:
    return x * 1.0


def test_a_row_that_is_lost_is_told_by_its_zeros(tmp_path: Path) -> None:
    first = first_of(traindiff.compare(trained(tmp_path / "a", same), trained(tmp_path / "b", without_a_row)))
    assert (first.path, first.kind) == ("between", "zeros")
    assert first.message.startswith(
        "64 of 512 elements are zero in the candidate and not in the baseline, as many as 1 of its 8 rows or 8 of "
        "its 64 columns hold. The difference is about as large as that makes it."
    )


def test_dropout_that_does_nothing_is_told_by_its_zeros(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "a", lambda x: functional.dropout(x, 0.3))
    first = first_of(traindiff.compare(baseline, trained(tmp_path / "b", lambda x: functional.dropout(x, 0.3, False))))
    assert (first.path, first.kind) == ("between", "zeros")
    assert "of 512 elements are zero in the baseline, and 0 in the candidate: was a mask, dropout" in first.message


def test_another_mask_of_the_same_share_and_other_values_have_no_zeros_to_speak_of(tmp_path: Path) -> None:
    def masked(seed: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) > 0.3)

    found = traindiff.compare(trained(tmp_path / "a", masked(0)), trained(tmp_path / "b", masked(1)))
    assert first_of(found).kind == "value"
    found = traindiff.compare(trained(tmp_path / "c", torch.tanh), trained(tmp_path / "d", torch.sin))
    assert first_of(found).kind == "value"


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.embedding(tokens))
        return found


def predicting(path: Path, loss: Callable[[Tensor, Tensor], Tensor]) -> Path:
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            tokens = torch.randint(0, 11, (4, 40), generator=torch.Generator().manual_seed(step))
            loss(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def ahead(number: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of predicting the token so many positions ahead."""

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        last = tokens.shape[1] - number
        return functional.cross_entropy(logits[:, :last].flatten(0, 1), tokens[:, number:].flatten())

    return loss


def test_labels_that_are_shifted_once_more_or_not_at_all_are_told_by_the_positions_they_reach(tmp_path: Path) -> None:
    baseline = predicting(tmp_path / "a", ahead(1))
    for number in (0, 2):
        first = first_of(traindiff.compare(baseline, predicting(tmp_path / f"{number}", ahead(number))))
        assert (first.step, first.phase) == (0, "loss")
        assert (
            f"The loss gives no gradient to 4 of 160 positions in the baseline, and to {4 * number} in the candidate: "
            "are labels shifted, padded or masked otherwise?"
        ) in first.message


def test_another_loss_that_reaches_the_same_positions_is_not_said_to_shift_labels(tmp_path: Path) -> None:
    def smoothed(logits: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)

    found = traindiff.compare(predicting(tmp_path / "a", ahead(1)), predicting(tmp_path / "b", smoothed))
    assert "shifted" not in first_of(found).message


class WithLabels(Words):
    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens)
        assert labels is not None
        found: Tensor = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return found


def labeled(path: Path, labels: Callable[[Tensor], Tensor]) -> Path:
    torch.manual_seed(0)
    model = WithLabels()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(2):
            tokens = torch.randint(0, 11, (4, 40), generator=torch.Generator().manual_seed(step))
            model(tokens, labels=labels(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_labels_that_are_the_tokens_in_one_run_only_are_told(tmp_path: Path) -> None:
    baseline = labeled(tmp_path / "a", lambda tokens: tokens.clone())
    first = first_of(traindiff.compare(baseline, labeled(tmp_path / "b", lambda tokens: tokens.roll(-1, 1))))
    assert (first.kind, first.slot) == ("batch", "input.labels")
    assert (
        "In the baseline it is equal to (root) input[0], in the candidate it is not: are labels shifted"
        in first.message
    )
