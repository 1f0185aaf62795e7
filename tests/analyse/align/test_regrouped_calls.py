"""Runs that divide the batch otherwise among calls of the model, and runs that call it once more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import traindiff
from traindiff.analyse.compare.verdict import Comparison

Loss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]
"""Of a model, a batch, its labels and the number of the step."""


def trained(path: Path, loss: Loss, *, own_loss: bool = False) -> Path:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    model = WithLoss(model) if own_loss else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(12, 6, generator=generator), torch.randint(4, (12,), generator=generator)
            loss(model, x, y, step)
            optimizer.step()
            optimizer.zero_grad()
    return path


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.model(x), y)


def at_once(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    loss = cross_entropy(model(x), y)
    loss.backward()
    return loss


def accumulated(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    loss = torch.zeros(())
    for some, their in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = cross_entropy(model(some), their) / 2
        loss.backward()
    return loss


def in_parts(*sizes: int, factor: Callable[[int], float] = lambda _: 1.0, lost: int = -1, swapped: int = -1) -> Loss:
    """The losses of some parts, added up before one backward pass."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        xs, ys = list(x.split(sizes)), list(y.split(sizes))
        if step == lost:
            xs[1], ys[1] = xs[0], ys[0]
        if step == swapped:
            ys = [ys[1], ys[0], *ys[2:]]
        parts = [cross_entropy(model(a), b) * len(a) / len(x) for a, b in zip(xs, ys, strict=True)]
        whole = torch.stack(parts).sum() * factor(step)
        whole.backward()
        return whole

    return loss


def joined(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    loss = cross_entropy(torch.cat([model(some) for some in x.chunk(3)]), y)
    loss.backward()
    return loss


def looking_after(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = at_once(model, x, y, step)
    model(x)
    return loss


def looking_before(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    model(x[:5])
    return at_once(model, x, y, step)


def two_views(*, together: bool = False, second_first: bool = False, shifted: int = -1) -> Loss:
    """A contrastive loss of two views, each of them a call, or both in one."""

    def loss(model: nn.Module, x: Tensor, _: Tensor, step: int) -> Tensor:
        a, b = x + 0.1, (x.roll(1, 0) if step == shifted else x) * 0.9
        if together:
            p, q = model(torch.cat([a, b])).chunk(2)
        elif second_first:
            q, p = model(b), model(a)
        else:
            p, q = model(a), model(b)
        whole = cross_entropy(normalize(p) @ normalize(q).T, torch.arange(len(x)))
        whole.backward()
        return whole

    return loss


def compared(where: Path, baseline: Loss, candidate: Loss) -> Comparison:
    return traindiff.compare(trained(where / "b", baseline), trained(where / "c", candidate))


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        (at_once, in_parts(6, 6)),
        (at_once, in_parts(7, 5)),
        (at_once, in_parts(*[1] * 12)),
        (in_parts(4, 8), in_parts(6, 3, 3)),
        (accumulated, in_parts(4, 4, 4)),
        (in_parts(6, 6), accumulated),
        (at_once, joined),
        (two_views(), two_views(together=True)),
        (two_views(), two_views(second_first=True)),
        (at_once, looking_before),
        (at_once, looking_after),
        (accumulated, looking_before),
    ],
)
def test_the_same_batch_in_other_calls_is_the_same_training(baseline: Loss, candidate: Loss, tmp_path: Path) -> None:
    found = compared(tmp_path, baseline, candidate)

    assert found.findings == ()
    assert found.verdict in ("identical", "equivalent")


def test_calls_that_are_brought_together_are_told(tmp_path: Path) -> None:
    notes = compared(tmp_path, at_once, in_parts(6, 6)).notes

    assert (
        "The runs divide the batch otherwise among calls of (root) and 3 more modules: norms and sums over all calls "
        "of a step were compared there." in notes
    )


@pytest.mark.parametrize(
    ("baseline", "candidate", "verdict", "phase"),
    [
        (at_once, in_parts(6, 6, lost=2), "misaligned", "batch"),
        (at_once, in_parts(6, 6, swapped=2), "diverged", "loss"),
        (accumulated, in_parts(6, 6, swapped=2), "diverged", "loss"),
        (at_once, in_parts(6, 6, factor=lambda step: 2.0 if step == 2 else 1.0), "diverged", "loss"),
        (two_views(), two_views(together=True, shifted=2), "diverged", "loss"),
    ],
)
def test_a_fault_in_other_calls_is_found(
    baseline: Loss, candidate: Loss, verdict: str, phase: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, baseline, candidate)

    assert found.verdict == verdict
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.phase) == (2, phase)


def test_the_lost_part_of_a_batch_is_counted_over_all_calls(tmp_path: Path) -> None:
    first = compared(tmp_path, at_once, in_parts(6, 6, lost=2)).first_divergence

    assert first is not None
    assert "6 of the baseline's 12 samples are missing" in first.message


def test_a_model_that_returns_its_loss_may_be_called_on_parts(tmp_path: Path) -> None:
    def whole(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
        loss: Tensor = model(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def parts(weights: tuple[float, float]) -> Loss:
        def loss(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
            one: Tensor = weights[0] * model(x[:8], y[:8]) + weights[1] * model(x[8:], y[8:])
            one.backward()  # type: ignore[no-untyped-call]
            return one

        return loss

    baseline = trained(tmp_path / "b", whole, own_loss=True)
    right = traindiff.compare(baseline, trained(tmp_path / "right", parts((8 / 12, 4 / 12)), own_loss=True))
    wrong = traindiff.compare(baseline, trained(tmp_path / "wrong", parts((0.5, 0.5)), own_loss=True))

    assert (right.verdict, right.findings) == ("equivalent", ())
    assert wrong.verdict == "diverged"


def salient(*, rolled: int = -1) -> Loss:
    """Asks for the gradient of the input first, and makes nothing of it."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        y = y.roll(1) if step == rolled else y
        seen = x.clone().requires_grad_()
        torch.autograd.grad(cross_entropy(model(seen), y), seen)
        return at_once(model, x, y, step)

    return loss


def test_a_call_for_the_gradient_of_the_input_is_no_other_training(tmp_path: Path) -> None:
    for number, sides in enumerate([(at_once, salient()), (salient(), at_once)]):
        found = compared(tmp_path / str(number), *sides)
        assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize("faulty_first", [False, True])
def test_a_fault_is_not_hidden_by_a_further_call(faulty_first: bool, tmp_path: Path) -> None:
    sides = (salient(rolled=2), at_once) if faulty_first else (at_once, salient(rolled=2))
    first = compared(tmp_path, *sides).first_divergence

    assert first is not None
    assert (first.step, first.phase in ("loss", "backward")) == (2, True)
