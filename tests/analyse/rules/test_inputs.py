"""Batches that were lost on the way, inputs with a single sample, and batches that come several times in a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import Batches, classifier, found, kinds, points, train
from traindiff.analyse.check import Verdict


def trained(path: Path, batches: Batches, *, steps: int = 16) -> Verdict:
    """What is said of a training on some batches."""
    model = classifier()
    return traindiff.check(train(path, model, SGD(model.parameters(), lr=0.05), steps=steps, batches=batches))


def zeroed(*steps: int, first: int, last: int) -> Batches:
    """Batches in some of which the samples from `first` to before `last` are zero."""

    def batches(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        if step in steps:
            inputs[first:last] = 0.0
        return inputs, labels

    return batches


@pytest.mark.parametrize(
    ("first", "last", "which"), [(0, 32, "all samples"), (0, 16, "the first half"), (16, 32, "the second half")]
)
def test_a_batch_that_is_lost_in_one_step_is_a_warning(first: int, last: int, which: str, tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", zeroed(9, first=first, last=last))

    finding = found(verdict, "zero-batch")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.slot) == (9, "batch", "input[0]")
    assert f"All inputs are zero for {which} of the batch; in other steps they are not." in finding.message


@pytest.mark.parametrize(("first", "last"), [(5, 6), (20, 32), (4, 20)])
def test_single_zero_samples_and_padding_are_none(first: int, last: int, tmp_path: Path) -> None:
    assert "zero-batch" not in kinds(trained(tmp_path / "run", zeroed(9, first=first, last=last)))


def test_inputs_that_are_always_zero_are_meant(tmp_path: Path) -> None:
    assert "zero-batch" not in kinds(trained(tmp_path / "run", zeroed(*range(16), first=16, last=32)))


class WithState(nn.Module):
    """A recurrent cell that is given its state, which is zero at the beginning of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(20, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return self.head(state), state.detach()


def test_a_state_of_zeros_beside_another_input_is_legal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithState()
    optimizer = SGD(model.parameters(), lr=0.05)
    state = torch.zeros(32, 16)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(12):
            inputs, labels = points(step)
            optimizer.zero_grad()
            logits, after = model(inputs, state)
            functional.cross_entropy(logits, labels).backward()
            optimizer.step()
            state = torch.zeros(32, 16) if step % 4 == 3 else after

    assert kinds(traindiff.check(tmp_path / "run")) == set()


class Captioned(nn.Module):
    """Images with a text."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.words, self.head = nn.Linear(20, 16), nn.Embedding(32, 16), nn.Linear(16, 4)

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.vision(pixels) + self.words(tokens).mean(dim=1))
        return logits


def with_tokens(path: Path, tokens: Callable[[int], Tensor]) -> Verdict:
    """What is said of a training on images with these tokens."""
    torch.manual_seed(0)
    model = Captioned()
    optimizer = SGD(model.parameters(), lr=0.05)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(8):
            inputs, labels = points(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs, tokens(step)), labels).backward()
            optimizer.step()
    return traindiff.check(path)


def drawn(step: int, *shape: int) -> Tensor:
    return torch.randint(32, shape, generator=torch.Generator().manual_seed(step))


def test_tokens_of_one_sample_for_all_images_are_a_warning(tmp_path: Path) -> None:
    finding = found(with_tokens(tmp_path / "run", lambda step: drawn(step, 1, 6)), "single-sample-input")

    assert (finding.phase, finding.slot, finding.evidence["samples"]) == ("batch", "input[1]", 32)
    assert "input[1] has 1 sample and input[0] has 32" in finding.message


def test_one_text_that_never_changes_is_meant_for_all_images(tmp_path: Path) -> None:
    assert kinds(with_tokens(tmp_path / "run", lambda _: drawn(0, 1, 6))) == set()


def test_a_text_for_each_image_is_right(tmp_path: Path) -> None:
    assert kinds(with_tokens(tmp_path / "run", lambda step: drawn(step, 32, 6))) == set()


@pytest.mark.parametrize("times", [2, 3])
def test_batches_that_come_several_times_in_a_row_are_a_warning(times: int, tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", lambda step: points(step // times), steps=18)

    finding = found(verdict, "repeated-batch")
    assert verdict.verdict == "healthy"
    assert finding.step == 1
    assert finding.evidence["num_steps"] == 18 - 18 // times
    assert "That is right if the training takes several steps on each batch" in finding.message
    assert "do the workers of a loader draw the same random numbers?" in finding.message


def test_epochs_of_a_few_batches_repeat_none_in_a_row(tmp_path: Path) -> None:
    assert kinds(trained(tmp_path / "run", lambda step: points(step % 3), steps=18)) == set()


def test_positions_that_all_samples_share_may_become_longer(tmp_path: Path) -> None:
    verdict = with_tokens(tmp_path / "run", lambda step: torch.arange(4 + step)[None])

    assert kinds(verdict) == set()


class WithLoss(Captioned):
    """Returns its loss before what it was computed from, as models of transformers do."""

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(pixels, tokens)
        return logits.square().mean(), logits


class OneText(Captioned):
    """One text about several images, as models for pictures and text are given: the result is that of the text."""

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        seen = self.vision(pixels)
        return self.head(seen.mean(dim=0) + self.words(tokens)), seen


@pytest.mark.parametrize(("kind", "expected"), [(WithLoss, {"single-sample-input"}), (OneText, set())])
def test_the_first_output_with_samples_decides(kind: type[Captioned], expected: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind()
    optimizer = SGD(model.parameters(), lr=0.05)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(6):
            optimizer.zero_grad()
            model(points(step)[0], drawn(step, 1, 6))[0].square().mean().backward()
            optimizer.step()

    assert kinds(traindiff.check(tmp_path / "run")) & {"single-sample-input"} == expected


class Words(nn.Module):
    """Predicts from tokens alone; a second input belongs to them sample by sample, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.other = nn.Embedding(32, 16), nn.Linear(16, 4), nn.Linear(6, 4)

    def forward(self, tokens: Tensor, others: Tensor | None = None) -> Tensor:
        words = self.words(tokens)
        logits: Tensor = self.head(words.mean(dim=1) if tokens.dim() > 1 else words)
        return logits if others is None else logits + self.other(others).mean(dim=0)


def of_words(path: Path, inputs: Callable[[int], tuple[Tensor, ...]], *, steps: int = 14) -> Verdict:
    """What is said of a training on these inputs."""
    torch.manual_seed(0)
    model = Words()
    optimizer = SGD(model.parameters(), lr=0.05)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(steps):
            given = inputs(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(*given), drawn(step, len(given[0])) % 4).backward()
            optimizer.step()
    return traindiff.check(path)


def lost_tokens(step: int, first: int, last: int) -> tuple[Tensor]:
    tokens = drawn(step, 12, 9) % 31 + 1
    tokens[first:last] *= step != 9
    return (tokens,)


@pytest.mark.parametrize(("first", "last", "which"), [(0, 12, "all samples"), (0, 6, "the first half")])
def test_tokens_that_are_lost_in_one_step_are_a_warning(first: int, last: int, which: str, tmp_path: Path) -> None:
    finding = found(of_words(tmp_path / "run", lambda step: lost_tokens(step, first, last)), "zero-batch")

    assert (finding.step, finding.phase) == (9, "batch")
    assert f"All inputs are zero for {which} of the batch" in finding.message


@pytest.mark.parametrize(
    "tokens",
    [
        lambda step: drawn(step, 12) * (step % 5 != 4),  # one class for each sample
        lambda step: drawn(step, 12, 2) * (step % 5 != 4),  # two flags
        lambda step: torch.cat([drawn(step, 12, 3), torch.zeros(12, 20, dtype=torch.long)], 1),  # padding
        lambda step: torch.cat([drawn(step, 9, 9), torch.zeros(3, 9, dtype=torch.long)]),  # padded samples
        lambda _: torch.zeros(12, 9, dtype=torch.long),  # one word for everything
    ],
)
def test_classes_flags_and_padding_of_zeros_are_none(tokens: Callable[[int], Tensor], tmp_path: Path) -> None:
    assert "zero-batch" not in kinds(of_words(tmp_path / "run", lambda step: (tokens(step),)))


def with_others(step: int, length: int, of_others: int) -> tuple[Tensor, Tensor]:
    return drawn(step, length, 9), torch.randn(of_others, 6, generator=torch.Generator().manual_seed(step))


def test_inputs_that_suddenly_differ_in_their_number_of_samples_are_a_warning(tmp_path: Path) -> None:
    finding = found(of_words(tmp_path / "run", lambda step: with_others(step, 6, 5 + (step != 9))), "unequal-inputs")

    assert (finding.step, finding.phase, finding.slot) == (9, "batch", "input[0]")
    assert finding.evidence == {"samples": 6, "other": "input[1]", "samples_of_other": 5, "equal": 9, "num_steps": 1}


@pytest.mark.parametrize(
    "inputs",
    [
        lambda step: with_others(step, 6, 5),  # never equal: nodes and edges
        lambda step: with_others(step, 6, 6 + step % 3),  # sometimes equal: sequences with time first
        lambda step: with_others(step, *[6 - 2 * (step % 7 == 6)] * 2),  # a shorter last batch
        lambda step: with_others(step, 6, 1),  # one for all
    ],
)
def test_inputs_of_other_kinds_are_none(inputs: Callable[[int], tuple[Tensor, ...]], tmp_path: Path) -> None:
    assert "unequal-inputs" not in kinds(of_words(tmp_path / "run", inputs))
