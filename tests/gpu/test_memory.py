"""Memory of a GPU: an observation that does not fit is lost and said, the training goes on; buffers stay small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.gpu.training import Training, assert_same_bits
from traindiff.core.kernels.store import SummaryStore

pytestmark = pytest.mark.gpu

MOST_BYTES = 64 << 20


def test_a_tap_that_runs_out_of_memory_ends_nothing(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Training(device=device).run()
    training = Training(device=device)
    calls = iter(range(1_000_000))

    def out_of_memory(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(store: SummaryStore, *args: Any) -> Any:
            if next(calls) == 50:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return method(store, *args)

        return called

    for name in ("add", "add_to"):
        monkeypatch.setattr(SummaryStore, name, out_of_memory(getattr(SummaryStore, name)))
    with (
        pytest.warns(UserWarning, match="CUDA out of memory"),
        traindiff.record(tmp_path / "run", training.model, training.optimizer),
    ):
        found = training.run()

    assert_same_bits(found, plain)
    assert traindiff.check(tmp_path / "run").verdict == "incomplete"


def test_a_recording_needs_little_memory_of_the_gpu(device: torch.device, tmp_path: Path) -> None:
    if device.type != "cuda":
        pytest.skip("counts the memory of a GPU")

    def peak(path: Path | None) -> int:
        training = Training(device=device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if path is None:
            training.run()
        else:
            with traindiff.record(path, training.model, training.optimizer, strict=True):
                training.run()
        return torch.cuda.max_memory_allocated()

    plain = peak(None)

    assert peak(tmp_path / "run") - plain < MOST_BYTES
