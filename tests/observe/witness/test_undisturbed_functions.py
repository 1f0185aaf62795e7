"""The witness leaves torch's functions as they are, and takes no other tensor for a parameter of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import traindiff

LINEAR = functional.linear


class Asks(nn.Module):
    """Notes which function `linear` is when it is called; attention may have another one for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 4)
        self.seen: list[Any] = []

    def forward(self, given: Tensor) -> Tensor:
        self.seen.append(functional.linear)
        found, _ = self.attention(given, given, given)
        self.seen.append(functional.linear)
        torch.jit.script(nn.Sequential(nn.Linear(3, 4)))
        result: Tensor = self.out(found)
        return result


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("raises", [False, True])
def test_linear_is_torchs_own_outside_of_attention(tmp_path: Path, *, raises: bool) -> None:
    torch.manual_seed(0)
    model = Asks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe={"witness", "products"}, strict=True):
        for _ in range(2):
            if raises:
                with pytest.raises(AssertionError):
                    model(torch.randn(2, 3, 5))
            model(torch.randn(2, 3, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert functional.linear is LINEAR
    assert all(one is LINEAR for one in model.seen)
    assert functional.linear is LINEAR
    assert traindiff.check(tmp_path / "run").verdict == "healthy"


@pytest.mark.parametrize("leaves", ["copies", "noise"])
def test_what_flows_to_tensors_in_the_place_of_parameters_is_not_theirs(leaves: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.LayerNorm(6), nn.Flatten(), nn.Linear(18, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def others() -> dict[str, Tensor]:
        held = {name: one.detach().clone() for name, one in model.named_parameters()}
        if leaves == "copies":
            return {name: one.requires_grad_() for name, one in held.items()}
        return {name: one + torch.zeros_like(one, requires_grad=True) for name, one in held.items()}

    with traindiff.record(tmp_path / "run", model, optimizer, observe={"grad", "witness"}, strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            given = torch.randn(4, 3, 6)
            (model(given) - functional_call(model, others(), (given + 0.1,))).square().mean().backward()
            optimizer.step()

    checked = traindiff.check(tmp_path / "run")
    assert checked.verdict == "healthy"
    assert not [note for note in checked.notes if note.startswith("Not witnessed")]
