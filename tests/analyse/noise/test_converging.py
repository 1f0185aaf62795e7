"""Trainings that converge: what cancels there differs by more than its size tells, and faults are still found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import traindiff

STEPS = 110
FAULTY = 70

ROWS, COLUMNS, CLASSES = 64, 8, 4


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y, IMAGES, SEQUENCES = (
    numbers(ROWS, COLUMNS, seed=1),
    numbers(ROWS, CLASSES, seed=2),
    numbers(16, 3, 8, 8, seed=3),
    numbers(8, 6, 4, seed=4),
)
LABELS = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(5))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 16, batch_first=True, num_layers=2), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.action, self.value = nn.Linear(COLUMNS, 16), nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.action(hidden), self.value(hidden)


def mlp(gate: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 32), gate(), nn.Linear(32, 32), gate(), nn.Linear(32, CLASSES))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 16), Residual(), Residual(), nn.LayerNorm(16), nn.Linear(16, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
    )  # fmt: skip


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(COLUMNS, COLUMNS) for _ in range(12)))


def policy_gradient(model: nn.Module) -> Tensor:
    """A loss that passes zero."""
    action, value = model(X)
    reward = torch.sin(torch.arange(float(ROWS)))
    advantage = (reward - value[:, 0]).detach()
    chosen = F.log_softmax(action, 1)[torch.arange(ROWS), LABELS]
    return -(advantage * chosen).mean() + 0.5 * F.mse_loss(value[:, 0], reward)


def margin(model: nn.Module) -> Tensor:
    """A loss that is zero as soon as each sample keeps its margin."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.multi_margin_loss(model(X[:16]), LABELS[:16])


def weighted(model: nn.Module) -> Tensor:
    return (torch.tensor([1.0, 10.0, 0.1, 3.0]) * (model(SEQUENCES) - Y[:8]).square()).mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)


@dataclass(frozen=True)
class Training:
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


TRAININGS = {
    "a linear regression": Training(lambda: nn.Linear(COLUMNS, CLASSES), lambda m: F.mse_loss(m(X), Y), sgd),
    "a linear classifier": Training(
        lambda: nn.Linear(COLUMNS, CLASSES), lambda m: F.cross_entropy(m(X), LABELS), sgd
    ),
    "a few samples that are fitted": Training(mlp, lambda m: F.mse_loss(m(X[:4]), Y[:4]), adam),
    "the same with SGD": Training(mlp, lambda m: F.mse_loss(m(X[:4]), Y[:4]), sgd),
    "a sum of squares": Training(mlp, lambda m: F.mse_loss(m(X[:4]), Y[:4], reduction="sum"), adam),
    "a Huber loss": Training(lambda: mlp(nn.Tanh), lambda m: F.smooth_l1_loss(m(X[:8]), Y[:8]), adam),
    "an L1 loss": Training(normalized, lambda m: F.l1_loss(m(X), Y), sgd),
    "outputs that vanish": Training(residual, lambda m: m(X).square().mean(), adam),
    "many layers whose output vanishes": Training(deep, lambda m: m(X[:4]).square().sum(), adam),
    "labels that are learned by heart": Training(mlp, lambda m: F.cross_entropy(m(X), LABELS), adam),
    "the same with residual blocks": Training(residual, lambda m: F.cross_entropy(m(X), LABELS), sgd),
    "two classes": Training(
        mlp, lambda m: F.binary_cross_entropy_with_logits(m(X), (Y > 0).float()), adam
    ),
    "distributions": Training(
        Recurrent,
        lambda m: F.kl_div(F.log_softmax(m(SEQUENCES), 1), F.softmax(Y[:8], 1), reduction="batchmean"),
        adam,
    ),
    "weighted squares": Training(Recurrent, weighted, adam),
    "images": Training(convolutions, lambda m: F.mse_loss(m(IMAGES), IMAGES).sqrt(), adam),
    "a margin that is kept": Training(mlp, margin, adam),
    "a policy": Training(Policy, policy_gradient, adam),
}  # fmt: skip


def train(
    path: Path,
    training: Training,
    fault: Callable[[nn.Module], None] = lambda _: None,
    *,
    replica: str | None = None,
    steps: int = STEPS,
) -> Path:
    torch.manual_seed(0)
    model = training.model()
    optimizer = training.optimizer(model)
    with traindiff.record(path, model, optimizer, replica=replica):
        for step in range(steps):
            if step == FAULTY:
                fault(model)
            training.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("name", TRAININGS)
def test_rounding_is_no_divergence_where_a_training_converges(name: str, tmp_path: Path) -> None:
    baseline = train(tmp_path / "baseline", TRAININGS[name])

    rounded = train(tmp_path / "rounded", TRAININGS[name], replica="ulp:1")

    comparison = traindiff.compare(baseline, rounded)
    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.parametrize("name", ["an L1 loss", "a margin that is kept"])
def test_measured_floors_allow_for_what_no_replica_showed(name: str, tmp_path: Path) -> None:
    baseline, *noise = (
        train(tmp_path / (replica or "baseline").replace(":", "-"), TRAININGS[name], replica=replica)
        for replica in (None, "ulp:1", "ulp:2", "reorder:1")
    )

    rounded = train(tmp_path / "rounded", TRAININGS[name], replica="ulp:3")

    comparison = traindiff.compare(baseline, rounded, noise=noise)
    assert comparison.verdict == "equivalent", str(comparison)


def first_weight(model: nn.Module) -> nn.Parameter:
    return next(parameter for parameter in model.parameters() if parameter.dim() > 1)


def wrong_gradient(model: nn.Module) -> None:
    first_weight(model).register_hook(lambda gradient: 1.03 * gradient)


def lost_rows(model: nn.Module) -> None:
    first_weight(model).register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) > 0).view(-1, 1))


def wrong_output(model: nn.Module) -> None:
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.register_forward_hook(lambda _, __, output: output + 0.01 * torch.linspace(-1, 1, output.shape[-1]))


FAULTS = [wrong_gradient, lost_rows, wrong_output]
SMOOTH = [
    "a linear regression",
    "a linear classifier",
    "a few samples that are fitted",
    "a Huber loss",
    "the same with residual blocks",
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", SMOOTH)
def test_a_fault_is_found_where_a_training_has_converged(
    name: str, fault: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    baseline = train(tmp_path / "baseline", TRAININGS[name], replica="ulp:1", steps=FAULTY + 2)

    faulty = train(tmp_path / "faulty", TRAININGS[name], fault, steps=FAULTY + 2)

    comparison = traindiff.compare(baseline, faulty)

    assert comparison.verdict == "diverged"
    assert comparison.findings[0].step == FAULTY
