"""Evaluations that draw random numbers, or that use a spectral norm which was not estimated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import found, kinds, points, train
from traindiff.analyse.check import Verdict


class Layer(nn.Module):
    """A layer with dropout as a function."""

    def __init__(self, *, leaks: bool, rate: float = 0.2) -> None:
        super().__init__()
        self.leaks, self.dropout = leaks, rate
        self.linear, self.head = nn.Linear(20, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.linear(x))
        logits: Tensor = self.head(functional.dropout(x, self.dropout, training=self.training or self.leaks))
        return logits


class Sampling(nn.Module):
    """A model that samples, in evaluation too, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(20, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        logits: Tensor = self.head(x + 0.1 * torch.randn_like(x))
        return logits


def evaluated(path: Path, model: nn.Module, *, times: int = 1, mode: bool = False, **settings: Any) -> Verdict:
    """What is said of a training that evaluates after each step, in a mode."""

    def evaluate(_: int) -> None:
        model.train(mode)
        with torch.no_grad():
            for _ in range(times):
                model(points(1000)[0])
        model.train()

    settings.setdefault("evaluation", True)
    optimizer = SGD(model.parameters(), lr=0.01)
    return traindiff.check(train(path, model, optimizer, steps=4, after_step=evaluate, **settings))


def test_dropout_as_a_function_that_is_active_in_evaluation_is_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    verdict = evaluated(tmp_path / "run", nn.Sequential(Layer(leaks=True)))

    finding = found(verdict, "random-evaluation")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.path, finding.evidence["rate"]) == (1, "0", 0.2)
    assert "it has dropout = 0.2" in finding.message


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_dropout_that_looks_at_its_mode_is_right(rate: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    verdict = evaluated(tmp_path / "run", nn.Sequential(Layer(leaks=False, rate=rate)), times=2)

    assert (kinds(verdict), verdict.notes) == (set(), ())


def test_models_that_sample_get_a_note(tmp_path: Path) -> None:
    torch.manual_seed(0)
    verdict = evaluated(tmp_path / "run", Sampling(), times=2)

    assert kinds(verdict) == set()
    assert any("draws random numbers in evaluation mode" in note for note in verdict.notes)
    assert any("gives another result for the same batch and parameters" in note for note in verdict.notes)


def test_a_model_in_training_mode_may_draw(tmp_path: Path) -> None:
    torch.manual_seed(0)
    verdict = evaluated(tmp_path / "run", nn.Sequential(Layer(leaks=False)), mode=True)

    assert "random-evaluation" not in kinds(verdict)


def test_an_evaluation_that_fails_leaves_the_next_one_in_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(leaks=True))
    failing = True

    def fail(*_: object) -> None:
        if failing:
            raise ValueError("failed")

    model[0].head.register_forward_pre_hook(fail)
    with traindiff.record(tmp_path / "run", model, optimizer := SGD(model.parameters(), lr=0.01), evaluation=True):
        model.eval()
        with torch.no_grad(), pytest.raises(ValueError, match="failed"):
            model(points(0)[0])
        failing = False
        with torch.no_grad():
            model(points(0)[0])
        model.train()
        functional.cross_entropy(model(points(0)[0]), points(0)[1]).backward()
        optimizer.step()

    assert found(traindiff.check(tmp_path / "run"), "random-evaluation").path == "0"


def test_looking_for_draws_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    def bits(record: Callable[..., Any] | None) -> Tensor:
        torch.manual_seed(0)
        model = Layer(leaks=True)
        optimizer = SGD(model.parameters(), lr=0.01)
        recorder = record(tmp_path / "bits", model, optimizer, evaluation=True, strict=True) if record else None
        for step in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(points(step)[0]), points(step)[1]).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                last = model(points(0)[0])
            model.train()
        if recorder:
            recorder.close()
        return last

    assert torch.equal(bits(None), bits(traindiff.record))


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    """A classifier with spectral norm."""
    torch.manual_seed(0)
    return nn.Sequential(norm(nn.Linear(20, 32)), nn.ReLU(), norm(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 4))


def first_evaluated(path: Path, model: nn.Module, **settings: Any) -> Verdict:
    """What is said of a training that begins with an evaluation."""
    optimizer = SGD(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer, strict=True, **settings):
        for step in range(3):
            model.eval()
            with torch.no_grad():
                model(points(1000)[0])
            model.train()
            optimizer.zero_grad()
            functional.cross_entropy(model(points(step)[0]), points(step)[1]).backward()
            optimizer.step()
    return traindiff.check(path)


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_fresh_spectral_norm_that_is_evaluated_first_is_a_warning(evaluation: bool, tmp_path: Path) -> None:
    verdict = first_evaluated(tmp_path / "run", normed(spectral_norm), evaluation=evaluation)

    found_at = [(one.step, one.path) for one in verdict.warnings if one.kind == "no-spectral-norm"]
    assert verdict.verdict == "healthy"
    assert found_at == [(0, "0.weight"), (0, "2.weight")]
    assert all(abs(one.evidence["estimate"]) < 0.5 for one in verdict.warnings)


def test_a_spectral_norm_that_a_checkpoint_brings_is_right(tmp_path: Path) -> None:
    trained = normed(spectral_norm)
    trained(points(0)[0])
    model = normed(spectral_norm)
    model.load_state_dict(trained.state_dict())

    assert kinds(first_evaluated(tmp_path / "run", model)) == set()


def test_a_spectral_norm_by_parametrization_is_estimated_when_it_is_made(tmp_path: Path) -> None:
    assert kinds(first_evaluated(tmp_path / "run", normed(parametrizations.spectral_norm))) == set()


def test_looking_at_spectral_norms_changes_no_vector(tmp_path: Path) -> None:
    plain, recorded = normed(spectral_norm), normed(spectral_norm)
    with traindiff.record(tmp_path / "run", recorded, SGD(recorded.parameters(), lr=0.01), strict=True):
        for model in (plain, recorded):
            model.eval()
            model(points(0)[0])

    for one, other in zip(plain.state_dict().values(), recorded.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_text_that_grows_by_zeros_is_another_batch(tmp_path: Path) -> None:
    """Zeros add nothing to a fingerprint. A model that generates is given its own output, token by token."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, evaluation=True):
        for _ in range(2):
            model(torch.tensor([[1, 2]])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for zeros in range(3):
                    model(torch.tensor([[3, *[0] * zeros]]))

    assert not [note for note in traindiff.check(tmp_path / "run").notes if "same batch" in note]
