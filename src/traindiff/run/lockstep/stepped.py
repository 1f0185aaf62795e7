"""The sides of a lockstep as the user gives them, each as a training with its step, and copies of the baseline."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.torch_compat.training import modules_in, parameters_in
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.torch.perturb.replica import compiled_parts
from traindiff.observe.torch.sharding.deepspeed_optimizer import find_engine
from traindiff.observe.torch.sharding.distributed_tensor import is_distributed
from traindiff.run.config.training import Training

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a batch: `loss(model, batch)`."""

_FORMS = (
    "Give (model, optimizer), (model, optimizer, step) where step(batch) does everything from the forward pass to "
    "zero_grad, a DeepSpeed engine, or a traindiff.Training."
)


def stepped(given: Any, *, name: str, loss: Loss | None, problems: list[Problem]) -> Training | None:
    """The side that the user gave, or None; then `problems` gets the reason.

    Its `loss` is None if the step is the user's own or an engine's, and so traindiff does not make it from a loss.

    Args:
        given: One of the forms that `Lockstep` takes.
        name: `baseline` or `candidate`.
        loss: The loss of a side without its own.
        problems: Receives the problems that are found.
    """
    if isinstance(given, Training):
        return _with_step(given) if given.step is None and given.loss is not None else replace(given, loss=None)
    if isinstance(given, nn.Module) and find_engine(given) is given:
        return Training(
            model=given, optimizer=None, batches=(), step=partial(_step_engine, given, loss or default_loss)
        )
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
        return Training(model=model, optimizer=optimizer, batches=(), step=own[0])
    return _with_step(Training(model=model, optimizer=optimizer, batches=(), loss=loss or default_loss))


def refuse_one_for_both(given: Sequence[Training | None], problems: list[Problem]) -> None:
    """Extend `problems` if both sides are the same model, which would be stepped twice."""
    baseline, candidate = given
    if baseline is not None and candidate is not None and baseline.model is candidate.model:
        what = "are the same model: it would be stepped twice for each batch."
        problems.append(
            Problem(where="Lockstep(baseline, candidate)", what=what, fix="Give each side a model of its own.")
        )


def _with_step(training: Training) -> Training:
    """The training with a step that traindiff makes from its loss."""
    assert training.loss is not None
    step = partial(_step_plain, training.model, _optimizers_of(training), training.loss)
    return replace(training, step=step)


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
        fix="Give Lockstep(loss=f), where f(model, batch) returns the loss, or have the model return the loss first.",
    )
    raise ConfigError("Lockstep(...)", [problem], consequence="nothing was trained")


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


def _optimizers_of(training: Training) -> tuple[Any, ...]:
    """Its optimizers one by one; none if an engine has its own."""
    given: Any = training.optimizer
    if isinstance(given, Mapping):
        return tuple(given.values())
    return tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)


def _shown(given: Any) -> str:
    if isinstance(given, (tuple, list)):
        return f"{type_of(given)} of {', '.join(map(type_of, given)) or 'nothing'}"
    return type_of(given)


REPLICAS = ("ulp:1", "ulp:2")
"""Perturbations of the copies; two, so that each can be compared with the other."""


def uncopyable(baseline: Training) -> str:
    """Why a side cannot be copied, as the end of a sentence about the baseline; empty if it can."""
    model = baseline.model
    if baseline.loss is None:
        return "has a step of its own"
    optimizers = _optimizers_of(baseline)
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        return "has no optimizer of torch's"
    if compiled_parts(model):
        return "is compiled"
    if any(is_distributed(parameter) for parameter in parameters_in(model)) or _is_flattened(model):
        return "is divided among ranks"
    if _process_group(model) is not None and _process_group(model) is not torch.distributed.group.WORLD:
        return "reduces over a process group of its own"
    return ""


def copied(baseline: Training) -> list[Training]:
    """Two copies of model and optimizer as they are now, of a side that can be copied."""
    found = []
    for _ in REPLICAS:
        model, optimizer = copy.deepcopy((baseline.model, baseline.optimizer))
        found.append(_with_step(replace(baseline, model=model, optimizer=optimizer)))
        for own in _optimizers_of(found[-1]):
            vars(own).pop("step", None)  # a schedule's replacement, which would step the original optimizer
    return found


def follow_settings(baseline: Training, copies: list[Training]) -> None:
    """Give the copies' optimizers the current settings of the baseline's, which a schedule may have changed."""
    for one in copies:
        for source, target in zip(_optimizers_of(baseline), _optimizers_of(one), strict=True):
            for given, group in zip(source.param_groups, target.param_groups, strict=True):
                group.update((name, value) for name, value in given.items() if name != "params")


def _is_flattened(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in modules_in(model))


def _process_group(model: nn.Module) -> Any:
    wrapper = nn.parallel.DistributedDataParallel
    return model.process_group if isinstance(model, wrapper) else None
