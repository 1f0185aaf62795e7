"""Embedding and head that were tied and are not any more are a warning."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import found, kinds


class Language(nn.Module):
    """Tokens to scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.mix(self.embed(tokens))))
        return result


def trained(path: Path, model: nn.Module, *, after_step: object = None) -> Path:
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(4):
            tokens = torch.randint(12, (4, 7), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            if callable(after_step):
                after_step(step)
    return path


def test_a_head_that_is_only_a_copy_of_the_embedding_is_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()
    model.head.load_state_dict(model.embed.state_dict())  # as a checkpoint of a tied model is loaded

    verdict = traindiff.check(trained(tmp_path / "run", model))

    finding = found(verdict, "tying-changed")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.path) == (0, "param", "head.weight")
    assert (
        "head.weight and embed.weight hold the same numbers before the first step and part in step 0" in finding.message
    )


def test_a_head_that_becomes_the_embedding_is_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()

    def copy(step: int) -> None:
        if step == 2:
            model.mix.requires_grad_(False)
            model.embed.requires_grad_(False)
            model.head.requires_grad_(False).weight.copy_(model.embed.weight)
            model.mix.requires_grad_(True)

    finding = found(traindiff.check(trained(tmp_path / "run", model, after_step=copy)), "tying-changed")

    assert finding.step == 3
    assert "something has tied or copied them since" in finding.message


def test_a_tied_head_and_one_of_its_own_are_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert kinds(traindiff.check(trained(tmp_path / "own", Language()))) == set()
    model = Language()
    model.head.weight = model.embed.weight
    assert kinds(traindiff.check(trained(tmp_path / "tied", model))) == set()


def test_layers_that_are_copies_of_each_other_are_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()
    model.mix = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model.mix[2].load_state_dict(model.mix[0].state_dict())

    assert kinds(traindiff.check(trained(tmp_path / "run", model))) == set()
