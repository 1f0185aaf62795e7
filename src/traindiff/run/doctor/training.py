"""Run a recipe for a few steps and keep every number of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from traindiff.core.torch_compat.training import modules_by_name
from traindiff.errors import ConfigError, Problem, TraindiffError
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.session.record import record
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.run.config.training import Training
from traindiff.run.verify.recipe import Recipe, failures_explained, name_of, prepared

SEED = 20_110

_SKIPPED_STEPS = 16
"""Steps that a loss scaler may skip at the beginning: it starts at 2^16 and halves each time."""


class _Network(nn.Module):
    """A class of its own, because torch does not compile a bare `nn.Sequential`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        block = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(0.1))
        self.layers = nn.Sequential(nn.Linear(width, width), *block, nn.LayerNorm(width), nn.Linear(width, 16))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


def built_in() -> Training:
    """A small network that a wrong hook would easily disturb: dropout, batch statistics, in-place operations."""
    width, samples = 256, 2048
    model = _Network(width)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(_: int) -> Tensor:
        inputs, labels = torch.randn(samples, width), torch.randint(16, (samples,))
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model=model, optimizer=optimizer, batches=range(1_000_000), step=step)


def try_out(recipe: Recipe) -> None:
    """Train without a recording, so that errors of the training are not blamed on one.

    Raises:
        ConfigError: The recipe cannot be used, a step fails, no optimizer is called, or trainings share their model.
    """
    training = prepared(recipe, seed=SEED, asked_by="doctor")
    where = f"recipe {name_of(recipe)}"
    if prepared(recipe, seed=SEED, asked_by="doctor").model is training.model:
        raise _wrong(
            where, "returns the same model when it is called again.", "Prepare everything from scratch in each call."
        )
    calls: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(None))
    try:
        with failures_explained("calling it", where=f"{where}, step", asked_by="doctor"):
            for batch in islice(cycle(training.batches), _SKIPPED_STEPS + 1):
                if not calls:
                    training.train_on(batch)
    finally:
        handle.remove()
    if not calls:
        fix = "Give at least one batch, and call optimizer.step() for each."
        raise _wrong(f"{where}, step", "does not call step() of an optimizer, or there are no batches.", fix)


def check_backend(name: str) -> None:
    """Raise `ConfigError` unless `torch.compile` knows a backend of this name."""
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        problem = Problem.unknown_name(where="--backend", kind="a backend of torch.compile", found=name, known=known)
        raise ConfigError("doctor", [problem])


def _wrong(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError("doctor", [Problem(where=where, what=what, fix=fix)])


Outcome = dict[str, Tensor]
"""Every number that a training computed, by name."""


def prepare(recipe: Recipe, *, backend: str | None) -> Training:
    """A fresh, seeded training; compiled with `backend` unless that is None."""
    training = prepared(recipe, seed=SEED, asked_by="doctor")
    if backend is not None:
        training.model.compile(backend=backend)
    return training


def train(
    recipe: Recipe, *, steps: int, backend: str | None, path: Path | None, observe: Sequence[str] = ()
) -> Outcome:
    """Losses, gradients, parameters, buffers and random state of a training, recorded if `path` is given.

    Args:
        recipe: Prepares the training.
        steps: Number of steps.
        backend: Backend of `torch.compile`; None does not compile.
        path: Of the recording; None records nothing.
        observe: What is recorded, if not what the recipe says.
    """
    if backend is not None:
        torch.compiler.reset()
    training = prepare(recipe, backend=backend)
    outcome: Outcome = {}
    with ExitStack() as stack:
        if path is not None:
            stack.enter_context(recorded(training, path, observe))
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: outcome.update(_gradients(optimizer, len(outcome)))
        )
        stack.callback(handle.remove)
        for step, batch in enumerate(islice(cycle(training.batches), steps)):
            returned = training.train_on(batch)
            found = tensors(returned, "loss")
            outcome |= {f"step {step} {slot}": tensor.detach().clone() for slot, tensor in found}
            outcome |= {f"step {step} parameter {name}": tensor for name, tensor in _state(training)}
    outcome["random state"] = torch.get_rng_state()
    return outcome


def recorded(training: Training, path: Path, observe: Sequence[str] = ()) -> Recorder:
    """A recording of the training that raises any error in it; of `observe` if that is not empty."""
    settings = {**training.record, **({"observe": observe} if observe else {}), "strict": True}
    return record(path, training.model, training.optimizer, **settings)


def _gradients(optimizer: Optimizer, number: int) -> Iterator[tuple[str, Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, parameter in enumerate(parameters):
        if parameter.grad is not None:
            yield f"gradient {number} of parameter {position}", parameter.grad.detach().clone()


def _state(training: Training) -> Iterator[tuple[str, Tensor]]:
    state: dict[str, Any] = training.model.state_dict()
    yield from ((name, value.detach().clone()) for name, value in state.items() if isinstance(value, Tensor))


def returning_modules(recipe: Recipe) -> set[str]:
    """Names of the modules that return tensors in one step, found with separate hooks."""
    training = prepare(recipe, backend=None)
    found: set[str] = set()
    with ExitStack() as stack:
        for name, module in modules_by_name(training.model).items():

            def note(_: object, __: object, output: object, name: str = name) -> None:
                if any(True for _ in tensors(output, "output")):
                    found.add(name)

            stack.callback(module.register_forward_hook(note).remove)
        training.train_on(next(iter(training.batches)))
    return found


def first_difference(actual: Outcome, expected: Outcome) -> str | None:
    """Name of the first number that differs in any bit, or None."""
    if list(actual) != list(expected):
        other = [name for name in (*expected, *actual) if (name in actual) != (name in expected)]
        return other[0] if other else "the order of things"
    for name, tensor in expected.items():
        if not _same_bits(actual[name], tensor):
            return name
    return None


def largest_distance(actual: Outcome, expected: Outcome) -> float:
    """The largest relative L2 distance of two tensors with the same name and shape; 0 if none can be told."""
    return max((_distance(actual[name], one) for name, one in expected.items() if name in actual), default=0.0)


def _distance(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape or not expected.is_floating_point() or expected.layout != torch.strided:
        return 0.0
    apart, size = (actual.double() - expected.double()).norm(), expected.double().norm()
    return float(apart / size) if size else 0.0


def _same_bits(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype or actual.layout != expected.layout:
        return False
    if actual.layout != torch.strided:
        return torch.equal(actual.to_dense(), expected.to_dense())
    pair = (tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (actual, expected))
    return torch.equal(*pair)


def explain(error: Exception) -> str:
    """An error in one line."""
    kind = "" if isinstance(error, TraindiffError) else f"{type(error).__name__}: "
    return kind + (str(error).strip().partition("\n")[0] or "no message")
