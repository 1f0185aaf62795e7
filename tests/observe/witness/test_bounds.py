"""Bounds hold where roundings are large: inputs far from zero, equal terms, sums in short dtypes. Faults stand out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.observe.witness.residuals import RIGHT, ratios, record
from traindiff.observe.torch.witness.normalized import Normalized


class ByHand(nn.Module):
    """A layer norm as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (32,), self.weight, self.bias)


class ChannelsLast(nn.Module):
    """A GroupNorm whose kernel computes the variance as a difference of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)
        nn.init.dirac_(self.before.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.before(x.contiguous(memory_format=torch.channels_last)))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(32), (256, 32)),
    "layer norm over two axes": (lambda: nn.LayerNorm((8, 4)), (256, 8, 4)),
    "layer norm as a function": (ByHand, (256, 32)),
    "rms norm": (lambda: nn.RMSNorm(32), (256, 32)),
    "batch norm": (lambda: nn.BatchNorm1d(32), (512, 32)),
    "batch norm of sequences": (lambda: nn.BatchNorm1d(8), (32, 8, 16)),
    "batch norm of images": (lambda: nn.BatchNorm2d(8), (8, 8, 8, 8)),
    "batch norm in evaluation": (lambda: nn.BatchNorm1d(32).eval(), (512, 32)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (32, 8, 8)),
    "group norm, channels last": (ChannelsLast, (8, 8, 8, 8)),
    "instance norm": (lambda: nn.InstanceNorm1d(8, affine=True), (32, 8, 16)),
    "instance norm of one sample": (lambda: nn.InstanceNorm2d(8, affine=True), (8, 8, 8)),
}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Gradients of the outputs have a mean."""
    target = torch.randn(batch.shape, generator=torch.Generator().manual_seed(1)) * 0.3 + 0.2
    output = model(batch)
    found: Tensor = (output.float() * target).sum() + (output.float() - target).square().mean()
    return found


def around(mean: float, shape: tuple[int, ...], deviation: float = 1.0) -> Tensor:
    return mean + deviation * torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "autocast", "float64"])
@pytest.mark.parametrize("kind", NORMS)
def test_inputs_far_from_zero_are_within_rounding(tmp_path: Path, kind: str, precision: str) -> None:
    make, shape = NORMS[kind]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return loss(model, batch)

    dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)
    for mean, deviation in ((100.0, 1.0), (10_000.0, 1.0), (3.7, 0.0), (0.0, 1e-4), (-50.0, 1e-3)):
        torch.manual_seed(0)
        path = record(
            tmp_path / f"{mean} {deviation}", make().to(dtype), [around(mean, shape, deviation).to(dtype)] * 2, step
        )
        assert max(ratios(path).values()) < RIGHT, (mean, deviation)
        assert traindiff.check(path, rules="wrong-gradient").verdict == "healthy"


def test_a_batch_norm_whose_running_mean_is_far_from_zero(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(32).eval()
    assert model.running_mean is not None
    model.running_mean.fill_(10_000.0)

    path = record(tmp_path / "run", model, [around(10_000.0, (512, 32))] * 2, loss)

    assert max(ratios(path).values()) < RIGHT


@pytest.mark.parametrize("kind", NORMS)
def test_wrong_gradients_behind_norms_far_from_zero_stand_out(tmp_path: Path, kind: str) -> None:
    make, shape = NORMS[kind]
    for mean, least in ((0.0, 100.0), (10.0, 30.0), (100.0, 4.0)):
        for wrong in (name for name, _ in make().named_parameters() if not name.startswith("before")):

            def change(model: nn.Module, step: int, wrong: str = wrong) -> None:
                gradient = model.get_parameter(wrong).grad
                assert gradient is not None
                gradient.mul_(1.01 if step == 1 else 1.0)

            torch.manual_seed(0)
            path = record(tmp_path / f"{mean} {wrong}", make(), [around(mean, shape)] * 2, loss, change=change)
            (found,) = traindiff.check(path, rules="wrong-gradient").findings
            assert (found.path, found.evidence["cause"]) == (wrong, "factor")
            assert ratios(path)[wrong] > least


EQUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "layer norm": (lambda: nn.LayerNorm(16), lambda: around(0.0, (8192, 16))),
    "batch norm": (lambda: nn.BatchNorm1d(16), lambda: around(0.0, (8192, 16))),
    "group norm": (lambda: nn.GroupNorm(2, 8), lambda: around(0.0, (1024, 8, 8))),
    "linear": (lambda: nn.Linear(8, 8), lambda: around(1.3, (40_000, 8), 1e-3)),
    "convolution": (lambda: nn.Conv1d(4, 4, 3), lambda: around(1.3, (512, 4, 16), 1e-3)),
    "embedding": (lambda: nn.Embedding(4, 8), lambda: torch.zeros(8192, dtype=torch.long)),
    "layer norm as a function": (ByHand, lambda: around(0.0, (8192, 32))),
}


@pytest.mark.parametrize("run", [8192, 512])
@pytest.mark.parametrize("kind", EQUAL)
def test_sums_of_equal_terms_round_in_one_direction(tmp_path: Path, kind: str, run: int) -> None:
    """The gradient of a sum is the same in each row; that of a mean over words is the same in each word of a text."""
    make, given = EQUAL[kind]
    for factor in (0.1, 0.7):
        torch.manual_seed(0)

        def step(model: nn.Module, batch: Tensor, factor: float = factor) -> Tensor:
            output = model(batch)
            factors = factor + torch.arange(-(-len(output) // run)).repeat_interleave(run)[: len(output)] % 7 * 0.01
            found: Tensor = (output * factors.view(-1, *[1] * (output.dim() - 1))).sum()
            return found

        path = record(tmp_path / str(factor), make(), [given()], step)
        assert max(ratios(path).values()) < RIGHT, factor


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv1d(8, 8, 3, padding=1), lambda: nn.Conv1d(8, 8, 3, padding=1, groups=4),
        lambda: nn.ConvTranspose1d(8, 8, 3, padding=1),
    ],
    ids=["plain", "groups", "transposed"],
)  # fmt: skip
def test_convolutions_of_many_samples_in_short_dtypes(
    tmp_path: Path, make: Callable[[], nn.Module], mean: float, precision: torch.dtype
) -> None:
    torch.manual_seed(0)
    path = record(tmp_path / "run", make().to(precision), [around(mean, (1024, 8, 16)).to(precision)] * 2, loss)

    assert max(ratios(path).values()) < RIGHT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_an_rms_norm_adds_what_torch_adds(dtype: torch.dtype) -> None:
    module, given = nn.RMSNorm(64), around(0.0, (4, 64), 1e-4).to(dtype)
    signs, gradient = torch.ones(4, 64, dtype=torch.promote_types(dtype, torch.float32)), torch.ones_like(given)

    found = Normalized(module, given).projected(gradient, signs)

    assert found is not None
    expected = functional.rms_norm(given, (64,)).double().sum(1)
    assert torch.allclose(found[0][:, 0], expected, rtol=0.0, atol=0.05 * 64**0.5)


@pytest.mark.parametrize("size", [1e-38, 1e-40, 1e-42, 1e-44])
@pytest.mark.parametrize("kind", ["linear", "layer norm", "batch norm", "embedding"])
def test_gradients_below_the_smallest_normal_number_are_within_rounding(tmp_path: Path, kind: str, size: float) -> None:
    make, given = EQUAL[kind]

    def tiny(model: nn.Module, batch: Tensor) -> Tensor:
        torch.manual_seed(1)
        output = model(batch)
        found: Tensor = (output * (size * torch.randn_like(output))).sum()
        return found

    torch.manual_seed(0)
    path = record(tmp_path / "run", make(), [given()] * 2, tiny)

    assert max(ratios(path).values()) < RIGHT
    assert traindiff.check(path, rules="wrong-gradient").verdict == "healthy"
