"""The training that a recipe prepares, and how its batches are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.common.containers import slots_of
from traindiff.observe.torch.session.targets import Optimizers

Split = Callable[[Any, int], Sequence[Any]]
"""Divides a batch into equal parts, in order: `split(batch, parts)`."""


_ARRAYS: tuple[type[Any], ...] = (Tensor, np.ndarray)


def split(batch: Any, parts: int, *, where: str, asked_by: str, by: Split | None = None) -> Sequence[Any]:
    """Equal parts of a batch, in order.

    Tensors and arrays with at least one axis are divided along the first one, however deep they are nested in tuples,
    lists, mappings and dataclasses. Everything else is the same in each part.

    Args:
        batch: Anything. Not changed; the parts are views of its tensors.
        parts: Number of parts.
        where: Owner of the batch, for messages.
        asked_by: The call, for messages.
        by: The recipe's own way.

    Returns:
        The parts; for one part `[batch]`, unchanged.

    Raises:
        ConfigError: The batch has no tensors, their first axes differ or cannot be divided, or `by` gave another number
            of parts.
    """
    if parts == 1:
        return [batch]
    if by is not None:
        given = by(batch, parts)
        if len(given) != parts:
            message = f"returned {len(given)} of a batch's parts when asked for {parts}."
            raise _cannot(f"{where}, split", message, "Return as many as asked for, equally large.", asked_by)
        return given
    lengths = sorted({one.shape[0] for _, one in slots_of(batch, "", _ARRAYS) if one.ndim})
    if not lengths:
        message = f"is {type_of(batch)} without tensors, so that its samples cannot be told apart."
        fix = "Give traindiff.Training(split=...), a function of batch and number of parts that returns the parts."
        raise _cannot(f"{where}, a batch", message, fix, asked_by)
    if len(lengths) > 1:
        message = f"has tensors with {', '.join(map(str, lengths))} rows, so that its samples cannot be told apart."
        fix = "Give traindiff.Training(split=...), a function of batch and number of parts that returns the parts."
        raise _cannot(f"{where}, a batch", message, fix, asked_by)
    if lengths[0] % parts:
        message = f"has {lengths[0]} samples, which cannot be divided into {parts} equal parts (ranks x micro-batches)."
        fix = f"Make batches of a multiple of {parts} samples, or ask for fewer ranks or micro-batches."
        raise _cannot(f"{where}, a batch", message, fix, asked_by)
    size = lengths[0] // parts
    return [_rows(batch, slice(part * size, (part + 1) * size)) for part in range(parts)]


def _cannot(where: str, what: str, fix: str, asked_by: str) -> ConfigError:
    return ConfigError(asked_by, [Problem(where=where, what=what, fix=fix)])


def _is_rows(value: Any) -> bool:
    return isinstance(value, _ARRAYS) and value.ndim > 0


def _rows(value: Any, rows: slice) -> Any:
    """The same value with these rows of every tensor in it."""
    if _is_rows(value):
        return value[rows]
    if isinstance(value, Mapping):
        parts = {name: _rows(one, rows) for name, one in value.items()}
        return parts if type(value) is dict else _like(value, parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rows(one, rows) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_rows(one, rows) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {one.name: _rows(getattr(value, one.name), rows) for one in fields(value) if one.init}
        return replace(value, **changed)
    return value


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """The parts in the mapping's own class (an ordered dict, transformers' `BatchEncoding`)."""
    made: Any = type(value)
    return made(parts)


TensorParallel = Mapping[str, Any] | Callable[[nn.Module, Any], object]
"""Parallel styles by path, or a function of model and mesh."""

Pipeline = Sequence[str] | Callable[[nn.Module, int, int], nn.Module]
"""Paths to cut before, or a function of model, stage and number of stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, ready to start; a recipe returns it.

    Attributes:
        model: The root module that `step` calls.
        optimizer: Its calls are the steps; see `traindiff.record`.
        batches: The arguments of `step`, one after the other. They must be the same in every run.
        step: Trains on one batch: forward, backward, `optimizer.step()`, `zero_grad()`. Its result is logged: a loss,
            or numbers by name. Leave it out if you give `loss`.
        loss: The mean loss over the samples of a batch, `loss(model, batch)`. traindiff makes the step from it, and can
            then also run the training under an engine, in another dtype, or in micro-batches.
        split: Divides a batch into equal parts, `split(batch, parts)`, in order; needed if traindiff cannot tell the
            samples of a batch apart. By default all tensors in a batch are divided along their first axis.
        tensor_parallel: How tensor parallelism divides the model: the plan of
            `torch.distributed.tensor.parallel.parallelize_module`, by path or glob of paths, or a function of model and
            mesh that divides the model in place. Every rank works on the whole batch.
        pipeline: How a pipeline divides the model: a function of model, stage and number of stages that returns the
            module of that stage, in which everything keeps its path; or the paths of modules before which torch's
            tracing frontend may cut the model, in order. `loss` must then call the model once per batch.
        record: Further settings of `traindiff.record`, e.g. `{"batch_axis": {"lstm": 1}}`.
        save: Saves the training as it does itself, into a directory: `save(directory)`, called on every rank between
            two steps. Only `traindiff.resume` calls it; without it, traindiff saves everything that it finds.
        load: Loads in a fresh process what `save` has written: `load(directory)`, before the first step. It may return
            the number of batches that are to be skipped, or the batches that follow; without a result, `batches` is
            iterated over from its beginning.
        state: Further objects whose state goes on from step to step, by name: schedulers, scalers, copies of weights.
            `traindiff.resume` finds those that `step`, `save` and `load` use by itself.
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
    save: Callable[[Path], object] | None = None
    load: Callable[[Path], object] | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    def train_on(self, batch: Any) -> Any:
        """Call `step`, which every prepared training has.

        Args:
            batch: One of `batches`.

        Returns:
            What is to be logged: a loss, or numbers by name.
        """
        assert self.step is not None
        return self.step(batch)


Four = tuple[nn.Module, Optimizers, Iterable[Any], Callable[[Any], Any]]
"""Model, optimizer, batches and step of a `Training`."""


def logged(returned: Any) -> Iterator[tuple[str, float | Tensor]]:
    """The result of `step` as names and numbers; it is a loss, or a mapping."""
    found = returned if isinstance(returned, Mapping) else {"loss": returned}
    for name, value in found.items():
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            yield str(name), value
