"""Losses of outputs that are broadcast against the targets of all samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.analyse.rules.small_trainings import found, kinds
from traindiff.analyse.check import Verdict

Loss = Callable[[Tensor, Tensor], Tensor]


class Flat(nn.Module):
    """Returns one number for each sample, without a second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x).squeeze(-1)
        return y


def trained(
    path: Path, loss: Loss, *, model: nn.Module | None = None, micro_batches: int = 1, dtype: torch.dtype | None = None
) -> Verdict:
    """What is said of a regression on 12 samples; `loss` is given outputs, and targets of the shape (N,)."""
    torch.manual_seed(0)
    model = model or nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(), traindiff.record(path, model, optimizer, strict=True):
        warnings.simplefilter("ignore")  # torch itself warns of some
        for _ in range(3):
            for x in torch.randn(12, 4).chunk(micro_batches):
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    value = loss(model(x), x.sum(1))
                value.backward()
            optimizer.step()
            optimizer.zero_grad()
    return traindiff.check(path)


WRONG: dict[str, Loss] = {
    "mse_loss": functional.mse_loss,
    "MSELoss": nn.MSELoss(),
    "l1_loss": functional.l1_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "by hand": lambda y, t: ((y - t) ** 2).mean(),
    "by hand, turned round": lambda y, t: (t - y).pow(2).sum() / len(t),
    "weighted": lambda y, t: 0.5 * (t.abs() * (y - t).abs()).mean() + 0.1 * y.square().mean(),
    "log-likelihood": lambda y, t: -(functional.logsigmoid(y) * t.sign()).mean(),
    "no reduction": lambda y, t: functional.mse_loss(y, t, reduction="none").mean(),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_without_an_axis_are_a_warning(name: str, tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", WRONG[name])

    finding = found(verdict, "broadcast-loss")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.path) == (0, "loss", "loss")
    assert finding.message.startswith(
        "The loss compares each of 12 outputs with 12 numbers: the model returns the shape (12, 1), and with a tensor "
        "of the shape (12,), that is broadcast to (12, 12)."
    )


@pytest.mark.parametrize(
    ("options", "samples"), [({"micro_batches": 3}, 4), ({"dtype": torch.bfloat16}, 12), ({"model": Flat()}, 12)]
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_it_is_seen_in_micro_batches_under_autocast_and_the_other_way_round(
    options: dict[str, object], samples: int, tmp_path: Path
) -> None:
    other = isinstance(options.get("model"), Flat)
    verdict = trained(
        tmp_path / "run", lambda y, t: functional.mse_loss(y, t[:, None] if other else t), **options  # type: ignore[arg-type]
    )  # fmt: skip

    assert f"each of {samples} outputs with {samples} numbers" in found(verdict, "broadcast-loss").message


class Double(torch.autograd.Function):
    """An operator in Python, between the model's layers and its output."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return 2.0 * gradients[0]


class EndsInPython(Flat):
    """Returns what such an operator returns, with a second axis."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Double.apply(self.out(x))
        return y


def test_outputs_of_an_operator_in_python_are_seen(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", lambda y, t: (y - t).abs().mean(), model=EndsInPython())

    assert "the shape (12, 1)" in found(verdict, "broadcast-loss").message


RIGHT: dict[str, tuple[Loss, nn.Module]] = {
    "the same shape": (lambda y, t: functional.mse_loss(y, t[:, None]), nn.Linear(4, 1)),
    "without an axis": (functional.mse_loss, Flat()),
    "all pairs": (lambda y, t: functional.softplus(-(y - y.T) * (t[:, None] - t).sign()).mean(), nn.Linear(4, 1)),
    "all pairs, one side detached": (lambda y, t: (y[:, None] - y.detach()).square().mean(), Flat()),
    "as many outputs as samples": (lambda y, t: (y - t).square().mean(), nn.Linear(4, 12)),
    "weights of outputs": (lambda y, t: (y * torch.arange(3.0)).square().mean(), nn.Linear(4, 1)),
    "similarities": (lambda y, t: functional.cross_entropy(y @ y.T, torch.arange(len(y))), nn.Linear(4, 8)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_losses_are_none(name: str, tmp_path: Path) -> None:
    loss, model = RIGHT[name]

    assert "broadcast-loss" not in kinds(trained(tmp_path / "run", loss, model=model))


def test_with_one_sample_nothing_is_broadcast(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", lambda y, t: (y - t).square().mean(), micro_batches=12)

    assert "broadcast-loss" not in kinds(verdict)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_the_mark_is_no_difference_of_two_runs(tmp_path: Path) -> None:
    trained(tmp_path / "one", functional.mse_loss)
    trained(tmp_path / "other", lambda y, t: ((y - t) ** 2).mean())

    assert traindiff.compare(tmp_path / "one", tmp_path / "other").verdict in ("identical", "equivalent")
