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
from traindiff.core.kernels.rows import ROW_BYTES, Deferred, Rows, is_late, resolved
from traindiff.core.kernels.store import SummaryStore
from traindiff.core.shards import Shard
from traindiff.core.summary import empty
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


def test_what_is_added_to_rows_arrives_in_its_row(store: SummaryStore, device: torch.device) -> None:
    rows = Rows()
    plain = [torch.full((3, number), float(number), device=device) for number in range(1, 4)]
    lost = torch.ones(2, device=device, dtype=torch.complex64)

    added = [store.add_to(rows, tensor, Shard.whole(tuple(tensor.shape))) for tensor in (plain[0], lost, *plain[1:])]
    store.end_step()

    assert [bool(place) for place in added] == [True, False, True, True]
    taken = rows.taken([place for place in added if place])
    assert is_late(taken)
    assert resolved(taken)["maximum"].tolist() == [1.0, 2.0, 3.0]


def test_tables_are_read_wherever_their_tensors_are_in_each_step(store: SummaryStore, device: torch.device) -> None:
    shapes = [(40, 300), (5,), (7, 3), (0, 2)]

    def made(step: int) -> list[torch.Tensor | None]:
        return [*(torch.full(shape, step + len(shape), device=device) for shape in shapes), None]

    shards = [*map(Shard.whole, shapes), Shard.whole(())]
    tables = store.tables(made(0), shards)
    steps, kept = [], []
    for step in range(3):
        rows, tensors = Rows(), made(step)
        before = empty()
        before["count"] = 77
        row = rows.append(before[()])
        first = rows.place(len(tensors))
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        store.add_tables(tables, np.array(addresses, dtype=np.int64), rows, first)
        store.end_step()
        steps.append(rows.taken([row, *(first + number * ROW_BYTES for number in range(len(tensors)))]))
        kept.append(tensors)

    for step, (rows, tensors) in enumerate(zip(steps, kept, strict=True)):
        assert is_late(rows)
        for found in (resolved(rows), resolved([*rows])):
            assert found["count"][:5].tolist() == [77, 12_000, 5, 21, 0]
            assert found["maximum"][1:4].tolist() == [step + 2, step + 1, step + 2]
        for row, tensor, shard in zip(resolved(rows)[1:4], tensors, shards, strict=False):
            assert tensor is not None
            assert row["fingerprint"] == summarize(tensor.cpu(), shard)["fingerprint"]


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
