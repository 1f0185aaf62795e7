"""A model, its optimizer, and the step that trains them on a batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.torch.perturb.replica import compiled_parts
from traindiff.observe.torch.session.targets import Optimizers
from traindiff.observe.torch.sharding.deepspeed_optimizer import find_engine
from traindiff.observe.torch.sharding.distributed_tensor import is_distributed
from traindiff.run.config.training import Training

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a batch: `loss(model, batch)`."""

_FORMS = (
    "Give (model, optimizer), (model, optimizer, step) where step(batch) does everything from the forward pass to "
    "zero_grad, a DeepSpeed engine, or a traindiff.Training."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A model, its optimizer, and the step that trains them on a batch.

    Attributes:
        name: `baseline`, `candidate`, or how a copy was made.
        model: The root module that `step` calls.
        optimizer: Its calls are the steps; see `traindiff.record`.
        step: Trains on a batch, from the forward pass to `zero_grad`. Returns the loss.
        loss: The loss from which traindiff made the step; None if the step is the user's or an engine's.
        record: Further settings of `traindiff.record`.
        batches: Batches that the side came with, or None.
    """

    name: str
    model: nn.Module
    optimizer: Optimizers
    step: Callable[[Any], Any]
    loss: Loss | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    batches: Iterable[Any] | None = None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Its optimizers one by one; none if an engine has its own."""
        return tuple(_listed(self.optimizer))


def stepped(given: Any, *, name: str, loss: Loss | None, problems: list[Problem]) -> Stepped | None:
    """The side that the user gave, or None and the reason in `problems`; `loss` is for a side without its own."""
    if isinstance(given, Training):
        return _of_training(given, name=name)
    if isinstance(given, nn.Module) and find_engine(given) is given:
        step = partial(_step_engine, given, loss or default_loss)
        return Stepped(name=name, model=given, optimizer=None, step=step)
    parts = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        what = "is a module without its optimizer." if isinstance(given, nn.Module) else f"is {_shown(given)}."
        problems.append(Problem(where=f"Lockstep({name}=...)", what=what, fix=_FORMS))
        return None
    model, optimizer, *own = parts
    if own and not callable(own[0]):
        what = f"has {type_of(own[0])} for its step, which cannot be called."
        problems.append(Problem(where=f"Lockstep({name}=...)", what=what, fix=_FORMS))
        return None
    if own:
        return Stepped(name=name, model=model, optimizer=optimizer, step=own[0])
    return made(model, optimizer, name=name, loss=loss or default_loss)


def refuse_one_for_both(given: Sequence[Stepped | None], problems: list[Problem]) -> None:
    """Extend `problems` if both sides are the same model, which would be stepped twice."""
    baseline, candidate = given
    if baseline is not None and candidate is not None and baseline.model is candidate.model:
        what = "are the same model: it would be stepped twice for each batch."
        problems.append(
            Problem(where="Lockstep(baseline, candidate)", what=what, fix="Give each side a model of its own.")
        )


def made(
    model: nn.Module, optimizer: Optimizers, *, name: str, loss: Loss, record: Mapping[str, Any] | None = None
) -> Stepped:
    """A side whose step traindiff makes from `loss`."""
    step = partial(_step_plain, model, tuple(_listed(optimizer)), loss)
    return Stepped(name=name, model=model, optimizer=optimizer, step=step, loss=loss, record=record or {})


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model computes: `model(*batch)`, `model(**batch)` or `model(batch)`.

    The model returns the loss itself, an object or mapping with a `loss`, or a tuple that starts with the loss.

    Raises:
        ConfigError: It returns none of these.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    what = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type_of(found)
    problem = Problem(
        where="Lockstep(loss=...)",
        what=f"is not given, and what {type(model).__name__} returns has {what} for a loss.",
        fix="Give loss=f, where f(model, batch) returns the loss that is minimized.",
    )
    raise ConfigError("Lockstep(...)", [problem], consequence="nothing was trained")


def _of_training(training: Training, *, name: str) -> Stepped:
    if training.step is None and training.loss is not None:
        side = made(training.model, training.optimizer, name=name, loss=training.loss)
    else:
        side = Stepped(name=name, model=training.model, optimizer=training.optimizer, step=training.train_on)
    return replace(side, record=training.record, batches=training.batches)


def _step_plain(model: nn.Module, optimizers: tuple[Any, ...], loss: Loss, batch: Any) -> Tensor:
    found = loss(model, batch)
    found.backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return found.detach()


def _step_engine(engine: Any, loss: Loss, batch: Any) -> Tensor:
    """The engine itself scales, accumulates, clips and zeroes."""
    found = loss(engine, batch)
    engine.backward(found)
    engine.step()
    return found.detach()


def _listed(optimizer: Optimizers) -> Iterator[Any]:
    if isinstance(optimizer, Mapping):
        yield from optimizer.values()
    elif isinstance(optimizer, (list, tuple)):
        yield from optimizer
    elif optimizer is not None:
        yield optimizer


def _shown(given: Any) -> str:
    if isinstance(given, (tuple, list)):
        return f"{type_of(given)} of {', '.join(map(type_of, given)) or 'nothing'}"
    return type_of(given)


REPLICAS = ("ulp:1", "ulp:2")
"""Perturbations of the copies; two, so that each can be compared with the other."""


def uncopyable(baseline: Stepped) -> str:
    """Why a side cannot be copied, as the end of a sentence about the baseline; empty if it can."""
    model = baseline.model
    if baseline.loss is None:
        return "has a step of its own"
    if not baseline.optimizers or not all(isinstance(one, Optimizer) for one in baseline.optimizers):
        return "has no optimizer of torch's"
    if compiled_parts(model):
        return "is compiled"
    if any(is_distributed(parameter) for parameter in model.parameters()) or _is_flattened(model):
        return "is divided among ranks"
    if _process_group(model) is not None and _process_group(model) is not torch.distributed.group.WORLD:
        return "reduces over a process group of its own"
    return ""


def copied(baseline: Stepped) -> list[Stepped]:
    """Two copies of model and optimizer as they are now, of a side that can be copied."""
    assert baseline.loss is not None
    found = []
    for replica in REPLICAS:
        model, optimizer = copy.deepcopy((baseline.model, baseline.optimizer))
        one = made(model, optimizer, name=f"baseline, {replica}", loss=baseline.loss, record=baseline.record)
        for own in one.optimizers:
            vars(own).pop("step", None)  # a schedule's replacement, which would step the original optimizer
        found.append(one)
    return found


def follow_settings(baseline: Stepped, copies: list[Stepped]) -> None:
    """Give the copies' optimizers the current settings of the baseline's, which a schedule may have changed."""
    for one in copies:
        for source, target in zip(baseline.optimizers, one.optimizers, strict=True):
            for given, group in zip(source.param_groups, target.param_groups, strict=True):
                group.update((name, value) for name, value in given.items() if name != "params")


def _is_flattened(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in model.modules())


def _process_group(model: nn.Module) -> Any:
    wrapper = nn.parallel.DistributedDataParallel
    return model.process_group if isinstance(model, wrapper) else None
