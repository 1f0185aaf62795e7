"""A session's summaries through the GPU kernel: put off, together, and the same as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from traindiff.core.kernels import summarize
from traindiff.core.kernels.registry import PUT_OFF
from traindiff.core.kernels.rows import Deferred, resolved
from traindiff.core.kernels.store import SummaryStore
from traindiff.core.shards import Shard
from traindiff.observe.torch.session import observations


@pytest.fixture
def store(device: torch.device) -> SummaryStore:
    return _store_on(device)


def _store_on(device: torch.device) -> SummaryStore:
    """The GPU kernel for tensors of this device: on the CPU, in Triton's interpreter."""
    return SummaryStore([replace(kernel, device_types=frozenset({device.type})) for kernel in PUT_OFF])


def test_what_is_added_is_read_after_the_step(store: SummaryStore, device: torch.device) -> None:
    tensors = [torch.randn(5, 7, device=device), torch.randn(130, device=device).to(torch.bfloat16)]
    shards = [Shard.whole(tuple(tensor.shape)) for tensor in tensors]

    added = [store.add(tensor, shard) for tensor, shard in zip(tensors, shards, strict=True)]
    store.end_step()

    assert all(isinstance(one, Deferred) for one in added)
    for found, tensor, shard in zip(resolved(added), tensors, shards, strict=True):
        assert found["fingerprint"] == summarize(tensor.cpu(), shard)["fingerprint"]


def test_what_is_added_together_has_its_own_rows(store: SummaryStore, device: torch.device) -> None:
    tensors = [torch.full((3, number + 1), float(number), device=device) for number in range(4)]
    with store.together():
        added = [store.add(tensor, Shard.whole(tuple(tensor.shape))) for tensor in tensors]
    store.end_step()

    assert [float(one["maximum"]) for one in resolved(added)] == [0.0, 1.0, 2.0, 3.0]


def test_steps_are_read_late_without_mixing(store: SummaryStore, device: torch.device) -> None:
    kept = []
    for step in range(4):
        kept.append(store.add(torch.full((8,), float(step), device=device), Shard.whole((8,))))
        store.end_step()

    assert [float(one["minimum"]) for one in resolved(kept)] == [0.0, 1.0, 2.0, 3.0]


def train(path: Path, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with traindiff.record(path, model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6).to(device)).square().mean().backward()
            optimizer.step()


def test_a_recording_through_the_gpu_kernel_is_that_of_the_cpu_kernel(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":  # the same training on the same device, summarized in the interpreter
        train(tmp_path / "cpu", device)
        monkeypatch.setattr(observations, "SummaryStore", lambda: _store_on(device))
    train(tmp_path / "gpu", device)

    recording = traindiff.open_recording(str(tmp_path / "gpu"))
    assert [len(step.observations) > 20 for step in recording.steps(0)] == [True] * 3
    assert not any(seen.unobserved for step in recording.steps(0) for seen in step.observations)
    if device.type == "cpu":
        assert traindiff.compare(tmp_path / "cpu", tmp_path / "gpu").verdict == "identical"
        for one, other in zip(
            traindiff.open_recording(str(tmp_path / "cpu")).steps(0), recording.steps(0), strict=True
        ):
            np.testing.assert_array_equal(one.summaries["zero"], other.summaries["zero"])
            np.testing.assert_allclose(one.summaries["sketch"], other.summaries["sketch"], rtol=1e-9, atol=1e-12)
