"""Faults of the forward pass: a layer computes something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import functional

from traindiff.run.demo.faults.fault import FirstSight, fault, replaced
from traindiff.run.demo.loop import TrainingLoop


@fault("gelu-tanh", first_sight=FirstSight(phase="forward", path="transformer.h.0.mlp.act", slot="output[0]"))
def gelu_tanh(loop: TrainingLoop) -> Iterator[None]:
    """Every GELU is computed by its tanh approximation, which is what another engine means by the name."""
    with ExitStack() as undo:
        for layer in range(loop.settings.size.num_layers):
            undo.enter_context(replaced(loop.model.block(layer).mlp.act, "approximate", "tanh"))
        yield


@fault("layernorm-eps", first_sight=FirstSight(phase="forward", path="transformer.h.2.ln_1", slot="output[0]"))
def layernorm_eps(loop: TrainingLoop) -> Iterator[None]:
    """One LayerNorm adds 1e-6 to the variance instead of 1e-5: the default of another framework."""
    with replaced(loop.model.block(2).ln_1, "eps", 1e-6):
        yield


@fault(
    "bfloat16-reduction",
    first_sight=FirstSight(phase="forward", path="transformer.h.1.ln_2", slot="output[0]"),
)
def bfloat16_reduction(loop: TrainingLoop) -> Iterator[None]:
    """One LayerNorm takes its mean and variance in bfloat16, everything else is float32."""
    norm = loop.model.block(1).ln_2

    def forward(x: Tensor) -> Tensor:
        low = x.to(torch.bfloat16)
        mean = low.mean(-1, keepdim=True).to(x.dtype)
        variance = low.var(-1, keepdim=True, correction=0).to(x.dtype)
        return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias

    with replaced(norm, "forward", forward):
        yield


@fault("mask-leak", first_sight=FirstSight(phase="forward", path="transformer.h.1.attn.proj", slot="output[0]"))
def mask_leak(loop: TrainingLoop) -> Iterator[None]:
    """One layer's causal mask lets each position see the one after it: the answer leaks into the question.

    Nothing is observed between the attention weights and the projection, so it shows there.
    """
    attention = loop.model.block(1).attn

    def visible(length: int, device: torch.device) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril(1)

    with replaced(attention, "visible", visible):
        yield


@fault("position-offset", first_sight=FirstSight(phase="forward", path="transformer.wpe", slot="output[0]"))
def position_offset(loop: TrainingLoop) -> Iterator[None]:
    """Positions are counted from 1, as with padding that one engine reserves and the other does not."""
    embedding = loop.model.transformer.wpe

    def forward(position: Tensor) -> Tensor:
        following = (position + 1).clamp(max=embedding.num_embeddings - 1)
        return functional.embedding(following, embedding.weight)

    with replaced(embedding, "forward", forward):
        yield


@fault("dropout-seed", first_sight=FirstSight(phase="forward", path="transformer.h.2.mlp.drop", slot="output[0]"))
def dropout_seed(loop: TrainingLoop) -> Iterator[None]:
    """One layer draws other dropout masks, as where random state was consumed on one side only."""
    with replaced(loop.model.block(2).mlp.drop, "layer", 1 << 20):
        yield


@fault(
    "bit-flip",
    first_sight=FirstSight(step=3, phase="forward", path="transformer.h.1.mlp.fc", slot="output[0]"),
)
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

    with replaced(loop, "begin_step", begin_step):
        yield
