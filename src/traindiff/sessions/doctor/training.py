"""Run a subject for a few steps and keep every number of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.errors import TraindiffError
from traindiff.sessions.doctor.subject import Build, Subject
from traindiff.sessions.record import record
from traindiff.taps.nested import tensors

Outcome = dict[str, Tensor]
"""Every number that a training computed, by name."""

SEED = 20_110


def prepare(build: Build, *, backend: str | None) -> Subject:
    """A fresh subject: random numbers from the start, compiled with `backend` unless that is None."""
    torch.manual_seed(SEED)
    subject = build()
    if backend is not None:
        subject.model.compile(backend=backend)
    return subject


def train(build: Build, *, steps: int, backend: str | None, path: Path | None) -> Outcome:
    """Losses, gradients, parameters, buffers and random state of a training, recorded if `path` is given."""
    if backend is not None:
        torch.compiler.reset()
    subject = prepare(build, backend=backend)
    outcome: Outcome = {}
    with ExitStack() as stack:
        if path is not None:
            stack.enter_context(record(path, subject.model, subject.optimizer, strict=True))
        handle = subject.optimizer.register_step_pre_hook(
            lambda optimizer, *_: outcome.update(_gradients(optimizer, len(outcome)))
        )
        stack.callback(handle.remove)
        for step in range(steps):
            returned = subject.step()
            found = tensors(returned, "loss")
            outcome |= {f"step {step} {slot}": tensor.detach().clone() for slot, tensor in found}
            outcome |= {f"step {step} parameter {name}": tensor for name, tensor in _state(subject)}
    outcome["random state"] = torch.get_rng_state()
    return outcome


def _gradients(optimizer: Optimizer, number: int) -> Iterator[tuple[str, Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, parameter in enumerate(parameters):
        if parameter.grad is not None:
            yield f"gradient {number} of parameter {position}", parameter.grad.detach().clone()


def _state(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    state: dict[str, Any] = subject.model.state_dict()
    yield from ((name, value.detach().clone()) for name, value in state.items() if isinstance(value, Tensor))


def returning_modules(build: Build) -> set[str]:
    """Names of the modules that return tensors in one step, found out with hooks of its own."""
    subject = prepare(build, backend=None)
    found: set[str] = set()
    with ExitStack() as stack:
        for name, module in subject.model.named_modules():

            def note(_: object, __: object, output: object, name: str = name) -> None:
                if any(True for _ in tensors(output, "output")):
                    found.add(name)

            stack.callback(module.register_forward_hook(note).remove)
        subject.step()
    return found


def first_difference(actual: Outcome, expected: Outcome) -> str | None:
    """Name of the first number that differs in any bit; None where there is none."""
    if list(actual) != list(expected):
        other = [name for name in (*expected, *actual) if (name in actual) != (name in expected)]
        return other[0] if other else "the order of things"
    for name, tensor in expected.items():
        if not _same_bits(actual[name], tensor):
            return name
    return None


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
