"""What a recipe prepares: a training, ready to start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from traindiff.sessions.targets import Optimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, ready to start: what a recipe returns.

    Attributes:
        model: The root module that `step` calls.
        optimizer: Whose calls are the steps; see `traindiff.record`.
        batches: What `step` is called with, one after the other. The same in every run.
        step: Trains on one batch: forward, backward, `optimizer.step()`, `zero_grad()`. What it returns is
            logged: a loss, or numbers by name. Left out where `loss` is given.
        loss: The mean loss over the samples of a batch, `loss(model, batch)`, from which traindiff makes the
            step: then it can also run the training under an engine, in another dtype, in micro-batches.
        split: Equal parts of a batch, `split(batch, parts)`, in order; for batches of which traindiff does not see
            what the samples are. By default all tensors in a batch are divided along their first axis.
        record: Further settings of `traindiff.record`, e.g. `{"batch_axis": {"lstm": 1}}`.
    """

    model: nn.Module
    optimizer: Optimizers
    batches: Iterable[Any]
    step: Callable[[Any], Any] | None = None
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    split: Callable[[Any, int], Sequence[Any]] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    def train_on(self, batch: Any) -> Any:
        """Call `step`, which each training has once it was prepared.

        Args:
            batch: One of `batches`.

        Returns:
            What is to be logged: a loss, or numbers by name.
        """
        assert self.step is not None
        return self.step(batch)


Four = tuple[nn.Module, Optimizers, Iterable[Any], Callable[[Any], Any]]
"""Model, optimizer, batches and step of a `Training`."""
