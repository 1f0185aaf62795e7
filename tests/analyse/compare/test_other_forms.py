"""One model that is called by name or by place, returns an object or a tensor, and keeps dims of length 1 or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.analyse.compare import Comparison, compare

WORDS, WIDTH, LENGTH = 20, 8, 6


class Returned(NamedTuple):
    """As libraries return it."""

    logits: Tensor
    hidden: Tensor


class Places(nn.Module):
    """Positions, with or without a batch axis, and a table of constants if asked."""

    def __init__(self, *, leading: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)
        self.leading = leading

    def forward(self, length: int) -> Tensor:
        places = torch.arange(length)
        return self.table(places[None] if self.leading else places)


class Constants(nn.Module):
    """A module that only one of the two has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.frequencies


class Model(nn.Module):
    """A small language model."""

    def __init__(self, *, named: bool, leading: bool, constants: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), Places(leading=leading)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.constants = Constants() if constants else None
        self.named = named

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.words(tokens) + self.places(tokens.shape[1])
        if self.constants is not None:
            hidden = self.constants(hidden)
        hidden = torch.tanh(self.body(hidden))
        logits = self.head(hidden)
        return Returned(logits, hidden) if self.named else (logits, hidden)


def train(path: Path, model: Model, *, shift: int = 0, scale: float = 1.0) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for _ in range(3):
            tokens = torch.randint(WORDS, (4, LENGTH), generator=made)
            tokens = (tokens + shift) % WORDS
            optimizer.zero_grad()
            logits = model(tokens=tokens).logits if model.named else model(tokens)[0]
            (scale * nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())).backward()
            optimizer.step()
    return path


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("forms") / "baseline", Model(named=True, leading=True, constants=True))


def against(baseline: Path, path: Path, **changed: Any) -> Comparison:
    return compare(baseline, train(path, Model(named=False, leading=False), **changed))


def test_they_are_equivalent(baseline: Path, tmp_path: Path) -> None:
    found = against(baseline, tmp_path / "candidate")

    assert found.verdict == "equivalent", str(found)
    compared = {(row.phase, row.path, row.slot) for row in found.differences}
    assert {
        ("batch", "", "input.tokens"),
        ("forward", "", "output.logits"),
        ("forward", "", "output.hidden"),
    } <= compared
    assert {one.path for side in found.unaligned for one in side} <= {"constants", "constants.frequencies"}
    shapes = "has the shape [1, 6, 8] in the baseline and [6, 8] in the candidate, likewise 1 more site:"
    assert any(shapes in note for note in found.notes)


def test_other_batches_and_gradients_are_still_found(baseline: Path, tmp_path: Path) -> None:
    batches = against(baseline, tmp_path / "shifted", shift=1)
    gradients = against(baseline, tmp_path / "scaled", scale=0.5)

    assert batches.verdict == "misaligned"
    assert batches.first_divergence is not None
    assert (batches.first_divergence.phase, batches.first_divergence.slot) == ("batch", "input.tokens")
    assert gradients.verdict == "diverged"
    assert gradients.first_divergence is not None
    assert gradients.first_divergence.phase in ("loss", "backward")


def test_the_same_shapes_and_names_stay_identical(baseline: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "again", Model(named=True, leading=True, constants=True))

    assert compare(baseline, again).verdict == "identical"


class Regression(nn.Module):
    """Predicts numbers in one column, or in none."""

    def __init__(self, *, column: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Sequential(nn.Linear(4, 1), *(() if column else (nn.Flatten(0),)))

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.head(values)
        return found


def test_a_loss_that_is_broadcast_differs_and_the_shapes_are_told(tmp_path: Path) -> None:
    for column in (False, True):
        model = Regression(column=column)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        with traindiff.record(tmp_path / str(column), model, optimizer):
            for _ in range(2):
                values = torch.randn(5, 4)
                (model(values) - values.sum(1)).square().mean().backward()
                optimizer.step()
    found = compare(tmp_path / "False", tmp_path / "True")

    assert found.verdict == "diverged"
    assert any(
        "head output[0] has the shape [5] in the baseline and [5, 1] in the candidate" in one for one in found.notes
    )
