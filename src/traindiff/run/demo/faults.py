"""The demo's known faults, each injected into a running training and taken back afterwards.

A fault changes what the training computes, never what traindiff sees of it. The place where it first shows is part of
its definition, and tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from traindiff.errors import ConfigError, Problem
from traindiff.run.demo.loop import TrainingLoop
from traindiff.run.demo.model import Batch

DEFAULT = "lost-gradient"
"""The fault that the demo shows when the user names none."""


Injection = Callable[[TrainingLoop], AbstractContextManager[None]]
"""Enter it to break a training loop, leave it to repair the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSight:
    """The first site, in execution order, at which any bit of a fault is visible.

    Attributes:
        step: The step.
        phase: The phase.
        path: Canonical path of the module or parameter; empty for the model's own inputs.
        slot: The tensor of that module or parameter.
        stage: Part of the phase, e.g. `micro` for a gradient before it is accumulated.
        missing: True if the faulty training has no such tensor at all.
    """

    step: int = 0
    phase: str
    path: str
    slot: str
    stage: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A known way in which trainings go wrong.

    Attributes:
        name: The name that the user gives.
        message: A sentence that says what goes wrong.
        first_sight: Where it first shows.
        fewest_micro_batches: Least number of micro-batches with which it can happen.
        inject: Breaks a training loop for as long as the context lasts.
    """

    name: str
    message: str
    first_sight: FirstSight
    fewest_micro_batches: int
    inject: Injection

    def check(self, micro_batches: int) -> None:
        """Raise `ConfigError` if the fault cannot happen with so few micro-batches."""
        if micro_batches < self.fewest_micro_batches:
            problem = Problem(
                where=f"micro_batches = {micro_batches}",
                what=f'is too few for the fault "{self.name}".',
                fix=f"Write at least {self.fewest_micro_batches}, and a number that divides the batch.",
            )
            raise ConfigError("the demo", [problem], consequence="nothing was trained")


FAULTS: dict[str, Fault] = {}
"""Faults by name, in the order of this file; `fault` adds them."""


def find_fault(name: str) -> Fault:
    """The fault of this name.

    Raises:
        ConfigError: The name is unknown; the message names the nearest fault, and all of them.
    """
    if name not in FAULTS:
        problem = Problem.unknown_name(where=f"fault = {name!r}", kind="a fault", found=name, known=FAULTS)
        raise ConfigError("the demo", [problem], consequence="nothing was trained")
    return FAULTS[name]


def fault(
    name: str, *, first_sight: FirstSight, fewest_micro_batches: int = 1
) -> Callable[[Callable[[TrainingLoop], Iterator[None]]], Fault]:
    """Turn a generator function that breaks a loop, yields, and repairs it into a fault.

    The first line of the function's docstring becomes the fault's message.
    """

    def make(break_and_repair: Callable[[TrainingLoop], Iterator[None]]) -> Fault:
        message = (inspect.getdoc(break_and_repair) or "").partition("\n")[0]
        FAULTS[name] = Fault(
            name=name, message=message, first_sight=first_sight, fewest_micro_batches=fewest_micro_batches,
            inject=contextmanager(break_and_repair),
        )  # fmt: skip
        return FAULTS[name]

    return make


@fault(
    "lost-gradient", first_sight=FirstSight(step=2, phase="grad", path="transformer.h.2.mlp.proj.weight", slot="grad"),
    fewest_micro_batches=3,
)  # fmt: skip
def lost_gradient(loop: TrainingLoop) -> Iterator[None]:
    """In step 2 the gradient of one linear layer loses what the third micro-batch contributed to it.

    Happens when a buffer is read before the gradient that was on its way has arrived.
    """
    healthy = loop.backward
    parameters = list(loop.model.block(2).mlp.proj.parameters())

    def backward(loss: Tensor, *, step: int, micro_step: int) -> None:
        if (step, micro_step) != (2, 2):
            return healthy(loss, step=step, micro_step=micro_step)
        before = [p.grad.clone() for p in parameters if p.grad is not None]
        healthy(loss, step=step, micro_step=micro_step)
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        return None

    with patch.object(loop, "backward", backward):
        yield


@fault(
    "gradient-scale", first_sight=FirstSight(phase="grad", path="transformer.wte.weight", slot="grad"),
    fewest_micro_batches=2,
)  # fmt: skip
def gradient_scale(loop: TrainingLoop) -> Iterator[None]:
    """Gradients are divided by the number of micro-batches twice, by the loop and by the engine."""
    healthy = loop.clip

    def clip() -> float:
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= loop.micro_batches
        return healthy()

    with patch.object(loop, "clip", clip):
        yield


@fault("missing-zero-grad", first_sight=FirstSight(step=1, phase="grad", path="transformer.wte.weight", slot="grad"))
def missing_zero_grad(loop: TrainingLoop) -> Iterator[None]:
    """Gradients are never set to zero, so each step adds its own to those of all steps before."""
    with patch.object(loop, "zero_grad", lambda: None):
        yield


@fault(
    "sign-flip",
    first_sight=FirstSight(phase="grad", stage="micro", path="transformer.h.1.attn.proj.weight", slot="grad"),
)
def sign_flip(loop: TrainingLoop) -> Iterator[None]:
    """A backward kernel returns one weight's gradient with the wrong sign."""
    weight = loop.model.block(1).attn.proj.weight
    hook = weight.register_hook(torch.neg)
    try:
        yield
    finally:
        hook.remove()


@fault(
    "tied-head-lost",
    first_sight=FirstSight(phase="grad", stage="micro", path="transformer.wte.weight", slot="grad"),
)
def tied_head_lost(loop: TrainingLoop) -> Iterator[None]:
    """The matrix that head and embedding share gets the embedding's gradient, but not the head's."""
    head = loop.model.lm_head

    def forward(x: Tensor) -> Tensor:
        return functional.linear(x, head.weight.detach())

    with patch.object(head, "forward", forward):
        yield


@fault(
    "frozen-layer",
    first_sight=FirstSight(phase="grad", stage="micro", path="transformer.h.1.mlp.fc.bias", slot="grad", missing=True),
)
def frozen_layer(loop: TrainingLoop) -> Iterator[None]:
    """One layer that is meant to be trained is still frozen."""
    layer = loop.model.block(1).mlp.fc
    layer.requires_grad_(False)  # noqa: FBT003  torch's own signature
    try:
        yield
    finally:
        layer.requires_grad_(True)  # noqa: FBT003


@fault("gelu-tanh", first_sight=FirstSight(phase="forward", path="transformer.h.0.mlp.act", slot="output[0]"))
def gelu_tanh(loop: TrainingLoop) -> Iterator[None]:
    """Every GELU is computed by its tanh approximation, which is what another engine means by the name."""
    with ExitStack() as undo:
        for layer in range(loop.settings.size.num_layers):
            undo.enter_context(patch.object(loop.model.block(layer).mlp.act, "approximate", "tanh"))
        yield


@fault("layernorm-eps", first_sight=FirstSight(phase="forward", path="transformer.h.2.ln_1", slot="output[0]"))
def layernorm_eps(loop: TrainingLoop) -> Iterator[None]:
    """One LayerNorm adds 1e-6 to the variance instead of 1e-5: the default of another framework."""
    with patch.object(loop.model.block(2).ln_1, "eps", 1e-6):
        yield


@fault("bfloat16-reduction", first_sight=FirstSight(phase="forward", path="transformer.h.1.ln_2", slot="output[0]"))
def bfloat16_reduction(loop: TrainingLoop) -> Iterator[None]:
    """One LayerNorm takes its mean and variance in bfloat16, everything else is float32."""
    norm = loop.model.block(1).ln_2

    def forward(x: Tensor) -> Tensor:
        low = x.to(torch.bfloat16)
        mean = low.mean(-1, keepdim=True).to(x.dtype)
        variance = low.var(-1, keepdim=True, correction=0).to(x.dtype)
        return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias

    with patch.object(norm, "forward", forward):
        yield


@fault("mask-leak", first_sight=FirstSight(phase="forward", path="transformer.h.1.attn.proj", slot="output[0]"))
def mask_leak(loop: TrainingLoop) -> Iterator[None]:
    """One layer's causal mask lets each position see the one after it: the answer leaks into the question.

    Nothing is observed between the attention weights and the projection, so it shows there.
    """
    attention = loop.model.block(1).attn

    def visible(length: int, device: torch.device) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril(1)

    with patch.object(attention, "visible", visible):
        yield


@fault("position-offset", first_sight=FirstSight(phase="forward", path="transformer.wpe", slot="output[0]"))
def position_offset(loop: TrainingLoop) -> Iterator[None]:
    """Positions are counted from 1, as with padding that one engine reserves and the other does not."""
    embedding = loop.model.transformer.wpe

    def forward(position: Tensor) -> Tensor:
        following = (position + 1).clamp(max=embedding.num_embeddings - 1)
        return functional.embedding(following, embedding.weight)

    with patch.object(embedding, "forward", forward):
        yield


@fault("dropout-seed", first_sight=FirstSight(phase="forward", path="transformer.h.2.mlp.drop", slot="output[0]"))
def dropout_seed(loop: TrainingLoop) -> Iterator[None]:
    """One layer draws other dropout masks, as where random state was consumed on one side only."""
    with patch.object(loop.model.block(2).mlp.drop, "layer", 1 << 20):
        yield


@fault("bit-flip", first_sight=FirstSight(step=3, phase="forward", path="transformer.h.1.mlp.fc", slot="output[0]"))
def bit_flip(loop: TrainingLoop) -> Iterator[None]:
    """Before step 3 the hardware flips one exponent bit of one weight.

    The weight becomes 16 times as large or as small.
    """
    healthy = loop.begin_step
    weight = loop.model.block(1).mlp.fc.weight

    def begin_step(step: int) -> None:
        healthy(step)
        if step == 3:
            bits = weight.data.view(torch.int32)
            bits[5, 7] ^= 1 << 25

    with patch.object(loop, "begin_step", begin_step):
        yield


@fault("label-shift", first_sight=FirstSight(phase="batch", path="", slot="input[1]"))
def label_shift(loop: TrainingLoop) -> Iterator[None]:
    """Targets are shifted twice, so that the model learns to predict the byte after the next.

    Happens when the data pipeline shifts labels and the model shifts them again.
    """
    healthy = loop.batch

    def batch(step: int) -> Batch:
        given = healthy(step)
        # The last position has no target left: cross_entropy ignores -100.
        return replace(given, targets=functional.pad(given.targets[:, 1:], (0, 1), value=-100))

    with patch.object(loop, "batch", batch):
        yield


@fault("duplicate-samples", first_sight=FirstSight(phase="batch", path="", slot="input[0]"))
def duplicate_samples(loop: TrainingLoop) -> Iterator[None]:
    """The second half of each batch repeats the first, as data workers with one common seed do."""
    healthy = loop.batch

    def batch(step: int) -> Batch:
        given = healthy(step)
        half = len(given.inputs) // 2
        return Batch(
            inputs=given.inputs[:half].repeat(2, 1),
            targets=given.targets[:half].repeat(2, 1),
            sample_ids=given.sample_ids[:half].repeat(2),
        )

    with patch.object(loop, "batch", batch):
        yield


@fault("decay-on-biases", first_sight=FirstSight(phase="optimizer", path="optimizer.groups[1]", slot="weight_decay"))
def decay_on_biases(loop: TrainingLoop) -> Iterator[None]:
    """Weight decay acts on biases and LayerNorms too, because the list of exceptions did not match."""
    with patch.dict(loop.optimizer.param_groups[1], weight_decay=loop.settings.weight_decay):
        yield


@fault("beta2", first_sight=FirstSight(phase="optimizer", path="optimizer.groups[0]", slot="betas[1]"))
def beta2(loop: TrainingLoop) -> Iterator[None]:
    """AdamW runs with its default beta2, 0.999, instead of the 0.95 of the demo."""
    decay, rest = loop.optimizer.param_groups
    betas = (loop.settings.betas[0], 0.999)
    with patch.dict(decay, betas=betas), patch.dict(rest, betas=betas):
        yield


@fault("learning-rate", first_sight=FirstSight(phase="optimizer", path="optimizer.groups[0]", slot="lr"))
def learning_rate(loop: TrainingLoop) -> Iterator[None]:
    """The schedule is one step ahead, as where it is advanced before the optimizer."""
    healthy = loop.learning_rate
    with patch.object(loop, "learning_rate", lambda step: healthy(step + 1)):
        yield


@fault("moments-dropped", first_sight=FirstSight(step=3, phase="optimizer", path="transformer.wte.weight", slot="step"))
def moments_dropped(loop: TrainingLoop) -> Iterator[None]:
    """Before step 3 the optimizer's state is lost, as when a checkpoint is resumed without it."""
    healthy = loop.begin_step

    def begin_step(step: int) -> None:
        healthy(step)
        if step == 3:
            loop.optimizer.state.clear()

    with patch.object(loop, "begin_step", begin_step):
        yield
