"""`record(detail=...)`: exponents, signs and whole tensors, of what the training really had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff


def train(path: Path, **settings: object) -> list[torch.Tensor]:
    """Two steps of a bfloat16 layer; returns the gradients of its weight."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    with traindiff.record(path, model, optimizer, strict=True, **settings):  # type: ignore[arg-type]
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 6).bfloat16()).relu().float().square().mean().backward()
            assert model.weight.grad is not None
            model.weight.grad[0, 0] = 0.0
            model.weight.grad[0, 1] = float("nan")
            gradients.append(model.weight.grad.clone())
            optimizer.step()
            model.weight.data.nan_to_num_()
    return gradients


def gradient_rows(path: Path) -> list[tuple[traindiff.Recording, object, int]]:
    recording = traindiff.open_recording(str(path))
    return [
        (recording, step, row)
        for step in recording.steps(0)
        for row, seen in enumerate(step.observations)
        if (seen.phase, seen.path) == ("grad", "weight")
    ]


def test_whole_tensors_are_those_of_the_training(tmp_path: Path) -> None:
    gradients = train(tmp_path / "run", detail="tensors")

    for (recording, step, row), gradient in zip(gradient_rows(tmp_path / "run"), gradients, strict=True):
        np.testing.assert_array_equal(recording.tensors(step, row)["value"], gradient.float().numpy())  # type: ignore[arg-type]


def test_signs_are_packed_with_a_mask_for_zero_and_nan(tmp_path: Path) -> None:
    gradients = train(tmp_path / "run", detail="signs")

    for (recording, step, row), gradient in zip(gradient_rows(tmp_path / "run"), gradients, strict=True):
        kept = recording.tensors(step, row)  # type: ignore[arg-type]
        flat = gradient.float().flatten().numpy()
        assert "value" not in kept
        positive, signless = (
            np.unpackbits(kept[name].view(np.uint8), count=flat.size, bitorder="little").astype(bool)
            for name in ("positive", "signless")
        )
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(positive, flat > 0)
        np.testing.assert_array_equal(signless, (flat == 0) | np.isnan(flat))


def test_nan_is_told_from_zero(tmp_path: Path) -> None:
    gradients = train(tmp_path / "run", detail="signs")

    for (recording, step, row), gradient in zip(gradient_rows(tmp_path / "run"), gradients, strict=True):
        bits = recording.tensors(step, row)["nan"].view(np.uint8)  # type: ignore[arg-type]
        flat = gradient.float().flatten()
        np.testing.assert_array_equal(
            np.unpackbits(bits, count=flat.numel(), bitorder="little").astype(bool), flat.isnan().numpy()
        )


def test_intervals_of_gradients_are_counted_and_of_nothing_else(tmp_path: Path) -> None:
    gradients = train(tmp_path / "run", bounds=[-0.01, 0, 0.01])

    for (recording, step, row), gradient in zip(gradient_rows(tmp_path / "run"), gradients, strict=True):
        counts = recording.tensors(step, row)["intervals"]  # type: ignore[arg-type]
        finite = gradient[~gradient.isnan()].double()
        edges = torch.bucketize(finite, torch.tensor([-0.01, 0, 0.01], dtype=torch.float64))
        assert counts.tolist() == edges.bincount(minlength=4).tolist()
    names = {path.name.partition("-")[2].partition(".")[0] for path in tmp_path.rglob("*.safetensors")}
    assert names == {"weight%20grad", "bias%20grad"}


def test_intervals_are_those_of_gradients_without_the_loss_scale(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True, observe="grad", bounds=[-0.1, 0.1]):
        scaler.scale(model(torch.randn(3, 6)).square().mean()).backward()
        assert model.weight.grad is not None
        gradient = model.weight.grad / 1024
        scaler.step(optimizer)

    ((recording, step, row),) = gradient_rows(tmp_path / "run")
    counts = recording.tensors(step, row)["intervals"]  # type: ignore[arg-type]
    assert step.observations[row].scaled  # type: ignore[attr-defined]
    assert counts.tolist() == [
        int((gradient <= -0.1).sum()), int(((gradient > -0.1) & (gradient <= 0.1)).sum()), int((gradient > 0.1).sum())
    ]  # fmt: skip


def test_bounds_that_do_not_ascend_are_refused_before_anything_is_attached(tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match=r"Write bounds=\[0, 1\]"):
        train(tmp_path / "run", bounds=[1, 0])
    assert not (tmp_path / "run").exists()


def test_exponents_count_every_finite_element_that_is_not_zero(tmp_path: Path) -> None:
    gradients = train(tmp_path / "run", detail=["exponents"])

    for (_, step, row), gradient in zip(gradient_rows(tmp_path / "run"), gradients, strict=True):
        counts = step.stored.exponents[row]  # type: ignore[attr-defined]
        finite = gradient[gradient.isfinite() & (gradient != 0)].double()
        expected = np.floor(np.log2(finite.abs().numpy())).astype(int) + 160
        np.testing.assert_array_equal(counts, np.bincount(expected, minlength=320))


def test_a_summary_alone_writes_no_tensor_files(tmp_path: Path) -> None:
    train(tmp_path / "run")

    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_unknown_detail_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match='Did you mean "tensors"'):
        train(tmp_path / "run", detail="tensor")
    assert not (tmp_path / "run").exists()
