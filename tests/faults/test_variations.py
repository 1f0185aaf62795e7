"""Legal variations raise no finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import traindiff
from tests.faults.models import CLASSES, VOCABULARY
from tests.faults.recipe import recipe, runs_here
from tests.faults.variations import DOUBLE, variations

TRAININGS = [
    ("mlp", "sgd", "float32"),
    ("mlp", "adamw", "autocast"),
    ("mlp", "adam", "bfloat16"),
    ("gpt", "adamw", "float32"),
    ("gpt", "adamw", "autocast"),
    ("gpt", "adamw", "bfloat16"),
    ("conv", "sgd", "float32"),
    ("conv", "sgd", "autocast"),
    ("conv", "adamw", "bfloat16"),
    ("lstm", "adam", "float32"),
    ("lstm", "sgd", "autocast"),
    ("lstm", "adamw", "bfloat16"),
]


def cases() -> Iterator[Any]:
    """Every variation of every training; without a release, each of a model in one precision, in turn."""
    for model in dict.fromkeys(model for model, *_ in TRAININGS):
        of_model = [training for training in TRAININGS if training[0] == model]
        names = dict.fromkeys(name for training in of_model for name in variations(*training))
        for number, name in enumerate(names):
            having = [training for training in of_model if name in variations(*training)]
            for position, training in enumerate(having):
                marks = () if position == number % len(having) else pytest.mark.release
                yield pytest.param(*training, name, id="-".join((*training, name)), marks=marks)


@pytest.fixture(scope="module")
def baselines() -> dict[tuple[str, ...], Path]:
    """Recordings that were made already, by training."""
    return {}


@pytest.mark.parametrize(("model", "optimizer", "precision", "name"), sorted(cases(), key=lambda case: str(case.id)))
def test_a_legal_variation_raises_no_finding(
    model: str,
    optimizer: str,
    precision: str,
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    baselines: dict[tuple[str, ...], Path],
) -> None:
    if not runs_here(model, precision):
        pytest.skip("torch has no such LSTM for this processor")
    training = recipe(model, optimizer, precision)  # type: ignore[arg-type]
    key = (model, optimizer, precision)
    if key not in baselines:
        baselines[key] = training.run(tmp_path_factory.mktemp("baseline") / "run")

    candidate = variations(*key)[name](training).run(tmp_path / "candidate")
    comparison = traindiff.compare(baselines[key], candidate)

    assert comparison.verdict in ("identical", "equivalent"), str(comparison)
    assert not comparison.findings
    assert not any(comparison.unaligned)


@pytest.mark.parametrize("model", ["mlp", "gpt", "conv", "lstm"])
def test_the_same_training_again_is_identical(model: str, tmp_path: Path) -> None:
    training = recipe(model)
    comparison = traindiff.compare(training.run(tmp_path / "baseline"), training.run(tmp_path / "candidate"))

    assert comparison.verdict == "identical"
    assert all(row.num_identical_steps == row.num_steps for row in comparison.differences)


@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_a_float64_batch_of_the_same_numbers_is_the_same_batch(model: str, tmp_path: Path) -> None:
    training = recipe(model, "sgd").but(steps=2)
    candidate = DOUBLE["float64"](training).run(tmp_path / "candidate")
    comparison = traindiff.compare(training.run(tmp_path / "baseline"), candidate)

    assert comparison.verdict == "equivalent", str(comparison)


def test_bfloat16_against_float32_parameters_of_the_same_values_is_no_other_initialization(tmp_path: Path) -> None:
    training = recipe("gpt").but(steps=3)
    comparison = traindiff.compare(
        training.run(tmp_path / "baseline"), training.but(precision="bfloat16").run(tmp_path / "candidate")
    )

    assert "initial-parameter" not in {finding.kind for finding in comparison.findings}


def test_the_states_of_an_lstm_merge_over_their_second_axis(tmp_path: Path) -> None:
    training = recipe("lstm").but(steps=3)
    candidate = training.but(micro_batches=(3, 5)).run(tmp_path / "candidate")
    comparison = traindiff.compare(training.run(tmp_path / "baseline"), candidate)

    assert comparison.verdict == "equivalent", str(comparison)


class Turn(nn.Module):
    """[batch, length, channels] -> [length, batch, channels]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class SequenceFirst(nn.Module):
    """A layer between two turns: [batch, length] of tokens -> [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.turn = Turn()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.turn(self.embed(tokens)).mean(0))


def test_a_batch_axis_that_is_not_the_first_is_said_and_not_called_a_divergence(tmp_path: Path) -> None:
    training = recipe("lstm").but(steps=3, build=SequenceFirst)
    candidate = training.but(micro_batches=(3, 5)).run(tmp_path / "candidate")
    comparison = traindiff.compare(training.run(tmp_path / "baseline"), candidate)

    assert (comparison.verdict, comparison.findings) == ("equivalent", ())  # as losses, gradients and updates agree
    assert any('record(batch_axis={"turn": 1}) or traindiff run' in note for note in comparison.notes)
