"""Experts of their own, compared with experts that are one tensor, by a map with `{m}` on one side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.analyse.compare import compare

MAP = '[[tensor]]\nbaseline = ["layers.{n}.experts.{m}.weight"]\ncandidate = ["layers.{n}.stack"]\n'
EXPERTS = 3


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, EXPERTS, bias=False)
        self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(1)
        return torch.stack([shares[:, n, None] * one(x) for n, one in enumerate(self.experts)]).sum(0)


class Together(nn.Module):
    def __init__(self, apart: Apart) -> None:
        super().__init__()
        self.router = nn.Linear(4, EXPERTS, bias=False)
        self.router.load_state_dict(apart.router.state_dict())
        self.stack = nn.Parameter(torch.stack([one.weight.detach() for one in apart.experts]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("be,bi,eoi->bo", self.router(x).softmax(1), x, self.stack)


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            x = x + one(x)
        return x


def models() -> tuple[Model, Model]:
    torch.manual_seed(0)
    apart = [Apart(), Apart()]
    return Model([*apart]), Model([Together(one) for one in apart])


def train(directory: Path, model: Model, *, halves: bool = False) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(directory, model, optimizer):
        for step in range(3):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            if halves and step == 1:
                gradient = model.get_parameter("layers.1.stack").grad
                assert gradient is not None
                gradient[2] *= 0.5
            optimizer.step()
            optimizer.zero_grad()
    return directory


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    (tmp_path / "map.toml").write_text(MAP)
    return tmp_path / "map.toml"


@pytest.mark.parametrize("back", [False, True])
def test_the_same_experts_are_equivalent(tmp_path: Path, layout: Path, *, back: bool) -> None:
    apart, together = models()
    paths = train(tmp_path / "apart", apart), train(tmp_path / "together", together)
    if back:
        paths = paths[::-1]
        turned = MAP.replace("baseline", "x").replace("candidate", "baseline").replace("x =", "candidate =")
        layout.write_text(turned)

    found = compare(*paths, map=layout)

    assert found.verdict == "equivalent", str(found)
    assert not any("Warning" in note for note in found.notes)


def test_a_wrong_gradient_of_one_expert_is_located_in_its_layer(tmp_path: Path, layout: Path) -> None:
    apart, together = models()
    paths = train(tmp_path / "apart", apart), train(tmp_path / "together", together, halves=True)

    first = compare(*paths, map=layout).first_divergence

    assert first is not None
    assert (first.step, first.phase) == (1, "grad")
    assert first.path.startswith("layers.1.experts.")
