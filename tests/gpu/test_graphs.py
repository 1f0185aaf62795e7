"""CUDA graphs: a training that captures its step is not disturbed, and the recording says what it cannot see."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import traindiff
from traindiff.core.torch_compat.cuda import beside_captures

pytestmark = pytest.mark.gpu


class Captured:
    """A training whose step is captured once, and then replayed."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, capturable=True)
        self.inputs, self.labels = torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()

    def run(self) -> list[torch.Tensor]:
        """Three steps to warm up on another stream, then the capture, and three replays."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        return [one.detach().cpu() for one in self.model.parameters()]


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    return device


def test_a_captured_step_is_replayed_with_the_same_bits_while_it_is_recorded(gpu: torch.device, tmp_path: Path) -> None:
    plain = Captured(gpu).run()

    training = Captured(gpu)
    with traindiff.record(tmp_path / "run", training.model, training.optimizer):
        found = training.run()

    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    recording = traindiff.open_recording(str(tmp_path / "run"))
    assert [bool(step.observations) for step in recording.steps(0)][:3] == [True] * 3


def test_a_capture_is_not_spoilt_by_a_thread_that_waits_for_numbers(gpu: torch.device) -> None:
    ended, waits = threading.Event(), [0]
    event = torch.cuda.Event()
    event.record()

    def wait() -> None:
        while not ended.is_set():
            with beside_captures():
                event.synchronize()
            waits[0] += 1

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        Captured(gpu).run()
    finally:
        ended.set()
        waiting.join()
    assert waits[0] > 100


def test_graphed_callables_train_the_same_while_they_are_recorded(gpu: torch.device, tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        training = Captured(gpu)
        training.model[0] = torch.cuda.make_graphed_callables(training.model[0], (training.inputs.clone(),))
        if path is None:
            for _ in range(3):
                training.step()
        else:
            with traindiff.record(path, training.model, training.optimizer):
                for _ in range(3):
                    training.step()
        return [one.detach().cpu() for one in training.model.parameters()]

    plain = run(None)

    assert all(torch.equal(one, other) for one, other in zip(run(tmp_path / "run"), plain, strict=True))
