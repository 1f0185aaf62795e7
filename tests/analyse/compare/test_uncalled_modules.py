"""A module that one run does not call is a difference only if what is computed from it differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff


class Attention(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = functional.linear(x, torch.cat([self.q.weight, self.k.weight, self.v.weight])).chunk(3, -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self, *, fused: bool = False, eps: float = 1e-5, activation: str = "act") -> None:
        super().__init__()
        self.activation = activation
        self.embed = nn.Embedding(32, 16)
        self.attention = Attention(fused=fused)
        self.norm = nn.LayerNorm(16, eps=eps)
        self.fc = nn.Linear(16, 16)
        self.act = nn.GELU()
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.fc(self.norm(x + self.attention(x)))
        if self.activation == "act":
            x = self.act(x)
        else:
            x = functional.gelu(x) if self.activation == "function" else functional.relu(x)
        return self.head(x)


def train(path: Path, model: Model) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def recorded(path: Path, *, fused: bool = False, eps: float = 1e-5, activation: str = "act") -> Path:
    torch.manual_seed(0)
    return train(path, Model(fused=fused, eps=eps, activation=activation))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("uncalled") / "baseline")


@pytest.mark.parametrize("turned", [False, True], ids=["missing", "extra"])
def test_fused_projections_are_equivalent(turned: bool, baseline: Path, tmp_path: Path) -> None:
    fused = recorded(tmp_path / "fused", fused=True)
    found = traindiff.compare(*((fused, baseline) if turned else (baseline, fused)))
    assert (found.verdict, found.exit_code, found.findings) == ("equivalent", 0, ())
    assert {(one.path, one.kind) for one in found.representation} == {
        (f"attention.{name}", "extra" if turned else "missing") for name in "qkv"
    }
    run, other = ("baseline", "candidate") if turned else ("candidate", "baseline")
    assert f"The {run} does not call attention.q; the {other} does." in found.notes[0]


def test_the_same_activation_as_a_function_is_equivalent(baseline: Path, tmp_path: Path) -> None:
    found = traindiff.compare(baseline, recorded(tmp_path / "function", activation="function"))
    assert (found.verdict, [one.path for one in found.representation]) == ("equivalent", ["act"])


def test_a_fault_behind_modules_that_are_not_called_comes_first(baseline: Path, tmp_path: Path) -> None:
    found = traindiff.compare(baseline, recorded(tmp_path / "wrong", fused=True, eps=0.1))
    first = found.first_divergence
    assert (found.verdict, first and first.path) == ("diverged", "norm")
    assert [one.path for one in found.findings if one.kind == "missing"] == [f"attention.{name}" for name in "qkv"]
    assert found.findings[-1].kind == "missing"


def test_a_module_that_is_not_called_comes_before_what_differs_right_after_it(baseline: Path, tmp_path: Path) -> None:
    found = traindiff.compare(baseline, recorded(tmp_path / "relu", activation="relu"))
    assert found.verdict == "diverged"
    assert [(one.path, one.kind) for one in found.findings[:2]] == [("act", "missing"), ("head", "value")]
    assert "The candidate does not call act; the baseline does." in found.findings[0].message


class Normed(nn.Module):
    """A convolution and its normalization, by the module or by its function."""

    def __init__(self, *, by_function: bool, momentum: float) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.by_function, self.momentum = by_function, momentum

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.conv(x), self.norm
        if self.by_function:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            x = functional.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, self.momentum
            )
        else:
            x = norm(x)
        y: Tensor = self.head(x.relu().mean((2, 3)))
        return y


def normed(path: Path, *, by_function: bool, momentum: float = 0.1) -> Path:
    torch.manual_seed(0)
    model = Normed(by_function=by_function, momentum=momentum)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            out = model(torch.randn(8, 3, 8, 8, generator=data))
            functional.cross_entropy(out, torch.randint(4, (8,), generator=data)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_a_count_of_calls_differs_where_a_function_takes_the_place_of_the_module(tmp_path: Path) -> None:
    found = traindiff.compare(normed(tmp_path / "a", by_function=False), normed(tmp_path / "b", by_function=True))

    assert found.verdict == "equivalent", str(found)
    counted = found.representation[-1]
    assert (counted.path, counted.slot) == ("norm.num_batches_tracked", "buffer")
    assert counted.message == "Only one run calls norm, which counts its calls (num_batches_tracked)."


def test_other_statistics_of_a_function_in_the_place_of_the_module_are_found(tmp_path: Path) -> None:
    found = traindiff.compare(
        normed(tmp_path / "a", by_function=False), normed(tmp_path / "b", by_function=True, momentum=0.2)
    )

    assert found.verdict == "diverged", str(found)
    assert found.first_divergence is not None
    assert found.first_divergence.path in ("norm.running_mean", "norm.running_var")
