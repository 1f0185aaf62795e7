"""Small trainings of every kind that taps must not disturb.

Each takes `observe`, which is called with the model and its optimizers and gives a context in which
to train, and returns everything that the training computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from tests.observe.hooks.models import CONTAINERS, WIDTH, Checkpointed, Keywords, Returning, TiedWeights, WithTable, mlp

Observe = Callable[[nn.Module, Any], AbstractContextManager[Any]]
Outcome = dict[str, Tensor]
"""Every number that a training computed, by name."""

TRAININGS: dict[str, Callable[[Observe], Outcome]] = {}

STEPS, SAMPLES = 3, 6


def training(function: Callable[[Observe], Outcome]) -> Callable[[Observe], Outcome]:
    def seeded(observe: Observe) -> Outcome:
        torch.manual_seed(0)
        return function(observe)

    TRAININGS[function.__name__] = seeded
    return seeded


def batches(count: int = STEPS, samples: int = SAMPLES) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(samples, WIDTH, generator=generator)


def gradients(model: nn.Module, step: int) -> Outcome:
    return {
        f"step {step} grad {name}": parameter.grad.to_dense().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def final_state(model: nn.Module, *optimizers: Optimizer) -> Outcome:
    outcome = {f"final {name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    outcome["final rng"] = torch.get_rng_state()
    for number, optimizer in enumerate(optimizers):
        for position, state in optimizer.state_dict()["state"].items():
            tensors = ((key, value) for key, value in state.items() if isinstance(value, Tensor))
            outcome |= {f"optimizer {number} {position} {key}": value.clone() for key, value in tensors}
    return outcome


def fit(
    model: nn.Module,
    observe: Observe,
    *,
    optimizer: Optimizer | None = None,
    loss_of: Callable[[Tensor], Tensor] | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train for a few steps of one batch each."""
    optimizer = optimizer or AdamW(model.parameters(), lr=0.01)
    loss_of = loss_of or (lambda batch: model(batch).square().mean())
    outcome: Outcome = {}
    with observe(model, optimizer):
        for step, batch in enumerate(batches()):
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            outcome |= {f"step {step} loss": loss.detach().clone(), **gradients(model, step)}
            optimizer.step()
            after_step()
    return outcome | final_state(model, optimizer)


@training
def plain(observe: Observe) -> Outcome:
    return fit(mlp(), observe)


@training
def dropout(observe: Observe) -> Outcome:
    return fit(nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.Linear(16, 4)), observe)


@training
def batch_norm(observe: Observe) -> Outcome:
    return fit(nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), observe)


@training
def module_called_twice(observe: Observe) -> Outcome:
    shared = nn.Linear(WIDTH, WIDTH)
    return fit(nn.Sequential(shared, nn.Tanh(), shared), observe)


@training
def in_place_relu(observe: Observe) -> Outcome:
    return fit(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)), observe)


@training
def in_place_on_a_view(observe: Observe) -> Outcome:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Unflatten(1, (4, 4)), nn.ReLU(inplace=True), nn.Flatten())
    return fit(model, observe)


@training
def tied_weights(observe: Observe) -> Outcome:
    return fit(TiedWeights(), observe)


@training
def reentrant_checkpointing(observe: Observe) -> Outcome:
    return fit(Checkpointed(use_reentrant=True), observe)


@training
def checkpointing(observe: Observe) -> Outcome:
    return fit(Checkpointed(use_reentrant=False), observe)


@training
def lstm(observe: Observe) -> Outcome:
    model = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
    return fit(model, observe, loss_of=lambda batch: model(batch.view(3, 2, WIDTH))[0].square().mean())


def _returning(name: str) -> Callable[[Observe], Outcome]:
    container, logits = CONTAINERS[name]

    def returning(observe: Observe) -> Outcome:
        model = Returning(container)
        return fit(model, observe, loss_of=lambda batch: logits(model(batch)).square().mean())

    returning.__name__ = f"returning_{name}"
    return training(returning)


for _name in CONTAINERS:
    _returning(_name)


@training
def keyword_inputs(observe: Observe) -> Outcome:
    model = Keywords()
    return fit(
        model,
        observe,
        loss_of=lambda batch: model(inputs=batch, scale=0.5, mask=batch[:, :4] > 0).square().mean(),
    )


@training
def evaluation_between_steps(observe: Observe) -> Outcome:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 4))

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(torch.ones(3, WIDTH))
        model.train()

    return fit(model, observe, after_step=evaluate)


@training
def gradient_accumulation(observe: Observe) -> Outcome:
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.01)
    outcome: Outcome = {}
    with observe(model, optimizer):
        for step, batch in enumerate(batches()):
            for part in batch.split([3, 2, 1]):
                (model(part).square().sum() / batch.numel()).backward()
            outcome |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return outcome | final_state(model, optimizer)


@training
def lbfgs_with_a_closure(observe: Observe) -> Outcome:
    model = mlp()
    optimizer = LBFGS(model.parameters(), max_iter=4)
    outcome: Outcome = {}
    with observe(model, optimizer):
        for step, batch in enumerate(batches()):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            outcome[f"step {step} loss"] = optimizer.step(closure).detach()
            outcome |= gradients(model, step)
    return outcome | final_state(model)


@training
def step_with_a_closure(observe: Observe) -> Outcome:
    """As PyTorch Lightning calls every optimizer: forward, backward and zero_grad happen inside of `step`."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.01)
    outcome: Outcome = {}
    with observe(model, optimizer):
        for step, batch in enumerate(batches()):

            def closure(batch: Tensor = batch) -> Tensor:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                return loss

            outcome[f"step {step} loss"] = optimizer.step(closure=closure).detach()
            outcome |= gradients(model, step)
    return outcome | final_state(model, optimizer)


@training
def two_optimizers(observe: Observe) -> Outcome:
    model = mlp()
    optimizers = [AdamW(model[0].parameters(), lr=0.01), SGD(model[2].parameters(), lr=0.1, momentum=0.9)]
    outcome: Outcome = {}
    with observe(model, optimizers):
        for step, batch in enumerate(batches()):
            model(batch).square().mean().backward()
            outcome |= gradients(model, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return outcome | final_state(model, *optimizers)


@training
def optimizer_not_given(observe: Observe) -> Outcome:
    return fit(mlp(), lambda model, _: observe(model, None))


@training
def gradient_scaler(observe: Observe) -> Outcome:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    outcome: Outcome = {}
    with observe(model, optimizer):
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            outcome |= gradients(model, step)
            scaler.step(optimizer)  # left out at step 1
            scaler.update()
    return outcome | final_state(model, optimizer)


@training
def graph_kept_for_a_second_backward(observe: Observe) -> Outcome:
    model = mlp()

    def loss_of(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        return loss

    return fit(model, observe, loss_of=loss_of)


@training
def parameter_as_output(observe: Observe) -> Outcome:
    return fit(WithTable(), observe)


@training
def inputs_that_require_grad(observe: Observe) -> Outcome:
    model = WithTable()
    return fit(model, observe, loss_of=lambda batch: model(batch.requires_grad_()).square().mean())


@training
def sparse_gradients(observe: Observe) -> Outcome:
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 4))
    tokens = torch.arange(6).view(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    return fit(model, observe, optimizer=optimizer, loss_of=lambda _: model(tokens).square().mean())


@training
def frozen_and_unused_parameters(observe: Observe) -> Outcome:
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    model.append(nn.Identity())
    model[3].unused = nn.Parameter(torch.ones(3))
    return fit(model, observe)


@training
def complex_activations(observe: Observe) -> Outcome:
    model = mlp()
    return fit(model, observe, loss_of=lambda batch: model(torch.fft.fft(batch).abs()).square().mean())


@training
def bfloat16(observe: Observe) -> Outcome:
    model = mlp().to(torch.bfloat16)
    return fit(model, observe, loss_of=lambda batch: model(batch.to(torch.bfloat16)).square().mean())
