"""The replica that moves statistics of batches: alike in every row, and no further than a kernel may be off."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.observe.perturb.test_reordered_operators import Sink
from tests.observe.perturb.test_trainings import ConvNet, Recurrent, fit
from traindiff.observe.torch.perturb.channel import ChannelReplica

U = 2.0**-24
ROWS = 8 * 16 * 16
IMAGE = torch.randn(8, 32, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 + 3
WEIGHT, BIAS = torch.linspace(0.5, 2, 32), torch.linspace(-1, 1, 32)
TOWARDS = torch.randn(IMAGE.shape, generator=torch.Generator().manual_seed(1)) + 1


def computed(seed: int | None, image: Tensor = IMAGE, *, training: bool = True) -> dict[str, Tensor]:
    """What BatchNorm computes forward and backward, in a replica of this seed."""
    given = [one.clone().requires_grad_() for one in (image, WEIGHT.to(image.dtype), BIAS.to(image.dtype))]
    mean, variance = torch.zeros(32, dtype=image.dtype), torch.ones(32, dtype=image.dtype)
    with ChannelReplica(seed).attach(Sink()) if seed is not None else torch.enable_grad():
        output = functional.batch_norm(given[0], mean, variance, *given[1:], training=training)
        gradients = torch.autograd.grad(output, given, TOWARDS.to(image.dtype))
    names = ("gradient", "of weight", "of bias")
    return {"output": output.detach(), "mean": mean, "variance": variance, **dict(zip(names, gradients, strict=True))}


def rows(tensor: Tensor) -> Tensor:
    """Channels first, all rows of a channel side by side: [channels, rows]."""
    return tensor.transpose(0, 1).flatten(1).double()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["output", "gradient"])
def test_all_rows_of_a_channel_share_one_error(name: str, layout: torch.memory_format) -> None:
    image = IMAGE.contiguous(memory_format=layout)
    plain, moved = computed(None, image)[name], computed(1, image)[name]
    apart, size = rows(moved) - rows(plain), rows(plain).square().mean(1).sqrt()
    known = torch.stack([torch.ones_like(apart), rows(IMAGE), rows(plain)], -1)

    shared = (known @ torch.linalg.lstsq(known, apart[..., None]).solution)[..., 0]

    assert moved.stride() == plain.stride()
    assert (shared.square().mean(1).sqrt() <= 3 * math.sqrt(ROWS) * U * size).all()
    assert shared.square().mean() > 25 * (apart - shared).square().mean()
    # Summed over rows it is far more than independent errors of its size would be.
    assert (apart.sum(1).abs() > 5 * math.sqrt(ROWS) * apart.square().mean(1).sqrt()).sum() >= 8


def test_statistics_and_gradients_of_parameters_move_with_it() -> None:
    plain, moved = computed(None), computed(1)

    for name, size in (("mean", 1), ("variance", 1), ("of weight", ROWS), ("of bias", ROWS)):
        apart = (moved[name] - plain[name]).abs()
        assert 4 * U * plain[name].abs().max() < apart.max(), name
        assert (apart <= 3 * math.sqrt(ROWS) * U * (plain[name].abs() + size)).all(), name


def test_a_seed_moves_alike_and_another_one_differently() -> None:
    first, again, other = computed(1), computed(1), computed(2)

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first)


def test_statistics_that_are_not_taken_from_the_batch_stay() -> None:
    plain, moved = computed(None, training=False), computed(1, training=False)

    assert all(torch.equal(plain[name], moved[name]) for name in plain)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(4, 32)], ids=["layer", "group"])
def test_what_has_no_statistics_of_a_batch_stays(norm: nn.Module) -> None:
    expected = norm(IMAGE)

    with ChannelReplica(1).attach(Sink()):
        assert torch.equal(norm(IMAGE), expected)


def test_a_longer_dtype_has_a_smaller_error_and_a_shorter_one_hides_it() -> None:
    wide, short = IMAGE.double(), IMAGE.bfloat16()

    assert 0 < (computed(1, wide)["output"] - computed(None, wide)["output"]).abs().max() < 1e-12
    apart = (computed(1, short)["output"] != computed(None, short)["output"]).float().mean()
    assert apart < 0.05


@pytest.mark.parametrize(("model", "differs"), [(ConvNet, True), (Recurrent, False)])
def test_a_training_differs_in_this_replica_if_it_takes_statistics_of_batches(
    model: Callable[[], nn.Module], differs: bool, tmp_path: Path
) -> None:
    plain, moved = fit(model, tmp_path / "plain", None), fit(model, tmp_path / "moved", "channel:1")

    assert moved == pytest.approx(plain, rel=1e-3)
    assert (moved != plain) == differs
