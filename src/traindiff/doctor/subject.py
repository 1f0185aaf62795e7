"""What the self-test trains if it is not given a recipe, and what it needs of the one that it is given."""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

from traindiff.errors import ConfigError, Problem
from traindiff.recipes.recipe import Recipe, failures_explained, name_of, prepared
from traindiff.setups.training import Training

SEED = 20_110

_SKIPPED_STEPS = 16
"""Steps that a loss scaler may skip at the beginning: it begins at 2^16 and halves each time."""


def built_in() -> Training:
    """A small network with what is easily disturbed: dropout, batch statistics, writing in place."""
    width, samples = 256, 2048
    block = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(0.1))
    model = nn.Sequential(nn.Linear(width, width), *block, nn.LayerNorm(width), nn.Linear(width, 16))
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
    """Train without a recording, so that what is wrong with the training is not blamed on one.

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
    """Raise unless `torch.compile` knows a backend of this name.

    Raises:
        ConfigError: It does not.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        problem = Problem.unknown_name(where="--backend", kind="a backend of torch.compile", found=name, known=known)
        raise ConfigError("doctor", [problem])


def _wrong(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError("doctor", [Problem(where=where, what=what, fix=fix)])
