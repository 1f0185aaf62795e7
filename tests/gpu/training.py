"""A small training on a device: a Transformer of two blocks, the same batches each time."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model

NAME = "TRAINDIFF_TEST_DEVICE"
"""Variable of the environment with the device on which these tests run."""


def used_device() -> torch.device:
    """The device on which a rank trains."""
    return torch.device(os.environ.get(NAME, "cuda"))


@dataclass(slots=True, kw_only=True)
class Training:
    """A model on a device, and how it is trained.

    Attributes:
        device: Of the model and its batches.
        dtype: Of autocast; None for float32.
        scaler: Whether a loss scaler is used.
        num_micro_batches: Backward passes in a step.
        compiling: Compiles the model, if given.
        stream: Whether the training uses a stream of its own.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    scaler: bool = False
    num_micro_batches: int = 1
    compiling: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None
    stream: bool = False
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self, *, steps: int = 4) -> dict[str, Tensor]:
        """Train; returns losses and parameters, on the CPU."""
        call = self.model if self.compiling is None else self.compiling(self.model)
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.scaler, init_scale=1024.0)
        data = torch.Generator().manual_seed(1)
        losses = []
        with self._on_stream():
            for _ in range(steps):
                tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data).to(self.device)
                for part in tokens.chunk(self.num_micro_batches):
                    with self._autocast():
                        logits = call(part[:, :-1])
                    loss = functional.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
                    scaler.scale(loss / self.num_micro_batches).backward()
                    losses.append(loss.detach())
                scaler.step(self.optimizer)
                scaler.update()
                self.optimizer.zero_grad()
        found = {f"loss {number}": loss.cpu() for number, loss in enumerate(losses)}
        return found | {name: one.detach().cpu() for name, one in self.model.named_parameters()}

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if not self.stream or self.device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Raise AssertionError with the names of the tensors that differ."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
