"""What a recipe prepares: a training, ready to start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from traindiff.sessions.targets import Optimizers

TensorParallel = Mapping[str, Any] | Callable[[nn.Module, Any], object]
"""Styles by path, or a function of model and mesh."""

Pipeline = Sequence[str] | Callable[[nn.Module, int, int], nn.Module]
"""Paths to cut before, or a function of model, stage and number of stages."""


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
        tensor_parallel: How tensor parallelism divides the model: by path or glob of paths what
            `torch.distributed.tensor.parallel.parallelize_module` takes, or a function of model and mesh that divides
            it in place. Every rank works on the whole batch.
        pipeline: How a pipeline divides the model: a function of model, stage and number of stages that returns the
            module of that stage, in which everything keeps its path; or the paths of modules before which the model
            may be cut, in order, for torch's tracing frontend. `loss` then calls the model once per batch.
        record: Further settings of `traindiff.record`, e.g. `{"batch_axis": {"lstm": 1}}`.
    """

    model: nn.Module
    optimizer: Optimizers
    batches: Iterable[Any]
    step: Callable[[Any], Any] | None = None
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    split: Callable[[Any, int], Sequence[Any]] | None = None
    tensor_parallel: TensorParallel | None = None
    pipeline: Pipeline | None = None
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
