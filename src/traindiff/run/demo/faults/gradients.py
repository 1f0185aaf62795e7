"""Faults of the backward pass: gradients that are lost, doubled, scaled or negated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from traindiff.run.demo.faults.fault import FirstSight, fault, replaced
from traindiff.run.demo.loop import TrainingLoop


@fault(
    "lost-gradient",
    first_sight=FirstSight(step=2, phase="grad", path="transformer.h.2.mlp.proj.weight", slot="grad"),
    fewest_micro_batches=3,
)
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

    with replaced(loop, "backward", backward):
        yield


@fault(
    "gradient-scale",
    first_sight=FirstSight(phase="grad", path="transformer.wte.weight", slot="grad"),
    fewest_micro_batches=2,
)
def gradient_scale(loop: TrainingLoop) -> Iterator[None]:
    """Gradients are divided by the number of micro-batches twice, by the loop and by the engine."""
    healthy = loop.clip

    def clip() -> float:
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= loop.micro_batches
        return healthy()

    with replaced(loop, "clip", clip):
        yield


@fault(
    "missing-zero-grad",
    first_sight=FirstSight(step=1, phase="grad", path="transformer.wte.weight", slot="grad"),
)
def missing_zero_grad(loop: TrainingLoop) -> Iterator[None]:
    """Gradients are never set to zero, so each step adds its own to those of all steps before."""

    def zero_grad() -> None:
        pass

    with replaced(loop, "zero_grad", zero_grad):
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

    with replaced(head, "forward", forward):
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
