"""An optimizer that works in the eigenvectors of matrices, beside parameters that are square themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import traindiff


class Soap(torch.optim.Optimizer):
    """Adam in the eigenvectors of the gradients' products, which QR refreshes (arXiv:2409.11321)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 3e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            products = [gradient @ gradient.T, gradient.T @ gradient]
            if not state:
                state.update(exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))
                state["GG"] = products
                state["Q"] = [torch.linalg.eigh(one)[1] for one in products]
                continue
            rows, columns = state["Q"]
            state["exp_avg"].lerp_(gradient, 0.1)
            state["exp_avg_sq"].lerp_((rows.T @ gradient @ columns).square(), 0.1)
            moved = rows.T @ state["exp_avg"] @ columns / (state["exp_avg_sq"].sqrt() + 1e-8)
            parameter.sub_(3e-3 * rows @ moved @ columns.T)
            for number, one in enumerate(products):
                state["GG"][number].lerp_(one, 0.1)
                state["Q"][number] = torch.linalg.qr(state["GG"][number] @ state["Q"][number])[0]


class Transposed(nn.Linear):
    """A linear layer that adds up its products in another order."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return (self.weight.flip(1) @ input.flip(1).t()).t()


def trained(
    path: Path, *, layer: type[nn.Linear] = nn.Linear, gradient: float = 1.0, state: str = "", factor: float = 1.0
) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(layer(12, 16, bias=False), nn.Tanh(), layer(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 4))
    model[4].bias = None
    optimizer = Soap(model.parameters())
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(64, 12, generator=data)
            cross_entropy(model(x), x[:, :4].argmax(-1)).backward()
            weight = model[2].weight
            weight.grad *= gradient
            if state and step == 3:
                optimizer.state[weight][state] *= factor
            optimizer.step()
    return path


def test_the_basis_of_a_square_parameter_is_known_by_its_slot(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "baseline")

    comparison = traindiff.compare(baseline, trained(tmp_path / "candidate", layer=Transposed))

    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.parametrize("factor", [0.99, 1.01, 2.0])
def test_a_wrong_gradient_of_a_square_parameter_is_found(factor: float, tmp_path: Path) -> None:
    candidate = trained(tmp_path / "candidate", layer=Transposed, gradient=factor)

    first = traindiff.compare(trained(tmp_path / "baseline"), candidate).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "grad", "2.weight")


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_a_state_is_judged_as_long_as_its_basis_has_the_same_bits(state: str, factor: float, tmp_path: Path) -> None:
    candidate = trained(tmp_path / "candidate", state=state, factor=factor)

    first = traindiff.compare(trained(tmp_path / "baseline"), candidate).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path, first.slot) == (3, "optimizer", "2.weight", state)
