"""Batches that repeat, hold samples twice, or hold nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train
from tests.on_ranks import run_on_ranks


def trained(path: Path, batches: object, **settings: object) -> Path:
    model = classifier()
    return train(path, model, SGD(model.parameters(), lr=0.01), steps=8, batches=batches, **settings)  # type: ignore[arg-type]


def test_the_same_batch_in_every_step_is_a_warning(tmp_path: Path) -> None:
    verdict = traindiff.check(trained(tmp_path / "run", lambda step: points(0)))

    (warning,) = verdict.warnings
    assert verdict.verdict == "healthy"
    assert (warning.kind, warning.step, warning.phase, warning.slot) == ("repeated-batch", 1, "batch", "input[0]")
    assert warning.evidence == {"num_steps": 7}


def test_the_same_batch_in_another_order_is_the_same(tmp_path: Path) -> None:
    def shuffled(step: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(step))
        inputs, labels = points(0)
        return inputs[order], labels[order]

    assert found(traindiff.check(trained(tmp_path / "run", shuffled)), "repeated-batch").step == 1


def test_micro_steps_with_the_same_samples_are_a_warning(tmp_path: Path) -> None:
    verdict = traindiff.check(trained(tmp_path / "run", lambda number: points(number // 2), micro_batches=2))

    (warning,) = verdict.warnings
    assert (warning.kind, warning.step, warning.evidence["num_steps"]) == ("repeated-batch", 0, 8)
    assert "All micro-steps of a step have the same samples" in warning.message


def test_a_batch_of_copies_is_a_warning(tmp_path: Path) -> None:
    def copies(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        return inputs[torch.arange(32) % 8], labels[torch.arange(32) % 8]

    (warning,) = traindiff.check(trained(tmp_path / "run", copies)).warnings

    assert (warning.kind, warning.step) == ("duplicate-samples", 0)
    assert (warning.evidence["copies"], warning.evidence["samples"], warning.evidence["ranks"]) == (24, 32, [])
    assert "24 of the 32 samples of a batch are copies of others" in warning.message


def test_few_copies_are_none(tmp_path: Path) -> None:
    def copies(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        return torch.cat([inputs[:20], inputs[:12]]), torch.cat([labels[:20], labels[:12]])

    assert kinds(traindiff.check(trained(tmp_path / "run", copies))) == set()


def on_ranks(path: str, same: bool) -> None:
    """A training under DistributedDataParallel whose ranks have the same samples, or each its own."""
    model = DistributedDataParallel(classifier())
    rank = 0 if same else distributed.get_rank()
    optimizer = SGD(model.parameters(), lr=0.01)
    train(Path(path), model, optimizer, steps=5, batches=lambda step: points(1000 * rank + step, samples=8))


def test_ranks_with_the_same_samples_are_a_warning(tmp_path: Path) -> None:
    run_on_ranks(on_ranks, 2, str(tmp_path / "run"), True)

    (warning,) = traindiff.check(tmp_path / "run").warnings

    assert (warning.kind, warning.step, warning.evidence["ranks"]) == ("duplicate-samples", 0, [0, 1])
    assert "Ranks 0 and 1 have the same samples, in 5 steps in a row" in warning.message


def test_ranks_with_samples_of_their_own_are_right(tmp_path: Path) -> None:
    run_on_ranks(on_ranks, 2, str(tmp_path / "run"), False)

    assert kinds(traindiff.check(tmp_path / "run")) == set()


def test_a_batch_of_constants_is_a_warning(tmp_path: Path) -> None:
    def constants(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        inputs[:24] = inputs[:24, :1]
        return inputs, labels

    verdict = traindiff.check(trained(tmp_path / "run", constants))

    (warning,) = verdict.warnings
    assert verdict.verdict == "healthy"
    assert (warning.kind, warning.step, warning.phase) == ("constant-batch", 0, "batch")
    assert warning.evidence["share"] == 0.75
